"""The training loop of one torch rank, and its steps: they call the parts of a Session in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from rekindle import names
from rekindle.console import say
from rekindle.errors import SessionError
from rekindle.protocol.heartbeat_page import RankActivity
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.member import NOTICE_S, Member
from rekindle.rank.progress import CurrentStep, HeldState, ProgressReporter, RankPlace, Records
from rekindle.rank.snapshot_schedule import SnapshotSchedule
from rekindle.recovery.faults.fault import FaultKind
from rekindle.states import StateId
from rekindle.training.sampler import StepSampler
from rekindle.training.torch.arguments import Arguments
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.session_data import Data, MicroBatch, Parts
from rekindle.training.torch.faults.repairs import check_use, inject, kind_of, may_come_from_peers
from rekindle.training.torch.groups.generation_group import leave_for_good
from rekindle.training.torch.groups.script_groups import init_again
from rekindle.training.torch.profiler import TorchProfiler
from rekindle.training.torch.state.capture import capture
from rekindle.training.torch.state.carried import Carried
from rekindle.training.torch.state.forgotten import LAST, Forgotten
from rekindle.training.torch.state.snapshot import TorchSnapshotWriter
from rekindle.training.torch.torch_generations import TorchGenerations

_IN_PARTS = (
    "with keep_global_batch=True a rank may have several parts of a step; use for part in "
    "step.parts(): ..."
)
_WEIGHTED = "and (loss * part.weight).backward()"


class Loop:
    """The training loop of one rank. It ends with the run, and its generations end with faults.

    member: None in a script without an agent.
    """

    def __init__(self, given: Arguments) -> None:
        given.check()
        self.given = given
        slot, world = rank_environment.slot_of_world()
        device = rank_environment.number("LOCAL_RANK")
        self._profiler = TorchProfiler(slot, device, given.model)
        waits, parts = self._profiler.loading, given.keep_global_batch
        self.data = Data(given.sampler, given.loader, world, waits, in_parts=parts)
        if parts:
            given.check_parts(self.data.sampler)
        channel = Channel.from_environment()
        if channel is None:
            rank_environment.check_is_rank()
        page = rank_environment.page()
        self.progress = ProgressReporter(page)
        self.records = Records(rank_environment.path(names.ENV_METRICS_FILE), page, slot)
        self.state = HeldState()
        self._step = CurrentStep()
        self._begun = 0  # bodies of steps
        self.generations = TorchGenerations(
            given,
            self.data,
            channel=channel,
            state=self.state,
            progress=self.progress,
            step=self._step,
        )
        self.repairs = self.generations.repairs
        self._snapshot_schedule = SnapshotSchedule(
            channel, self.generations.place, self._profiler, self._writer
        )
        self._forgotten: Forgotten | None = None
        self._carried: Carried | None = None
        self.member: Member | None = None
        if channel is not None:
            everything = self.generations.everything
            self._forgotten = Forgotten(everything, given.objects(), given.ignore)
            self._carried = Carried((*everything.values(), *given.objects()), given.ignore)
            self.member = Member(
                channel, slot, self.progress, self.state, self.generations, given.on_recovery
            )

    @property
    def generation(self) -> int:
        """The generation that this rank is in; 0 without an agent."""
        return self.member.generation if self.member is not None else 0

    def begin(self) -> None:
        """Meet the other ranks, and take the state from which training continues."""
        if self.member is None:
            self.generations.form_by_hand()
        else:
            self.member.join()

    def end(self, *, raised: bool) -> None:
        """Leave the process group. raised: an exception of the script ends the loop."""
        self.generations.close()
        if self.member is not None:
            finished, total = self.state.finished, self.progress.total
            if not raised and 0 < finished < total and not self._is_left():
                say(
                    f"rank {self.generations.slot} leaves its loop after step {finished} of "
                    f"{total}; if other ranks do not, the job ends with an error when this rank "
                    "ends"
                )
                self.keep(last=True, leaves=True)
            self.generations.group.leave()
        elif dist.is_initialized():
            leave_for_good()
        if self.given.wrapper is not None:
            self.given.wrapper.bind(None)
        init_again()
        self.progress.leave()
        self.data.close()
        self._snapshot_schedule.close()
        self._profiler.close()
        self.records.close()

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number of each remaining step of `total`; repeat a step that a fault broke.

        Raises SessionError: the script has not used a step.
        """
        self.progress.asked_for(total)
        unused = -1  # the begun steps when the script got its last one
        while True:
            member, finished = self.member, self.state.finished
            if member is not None and self._is_left():
                if not member.join():
                    return
            elif finished >= total:
                # A new process must not wait at a place that the others have left.
                if member is None or total <= member.ended_step or not member.join():
                    return
            elif member is not None and member.hold():
                self.repairs.device.free()
            elif unused == self._begun:
                raise SessionError(
                    f"the script asks for the next step, but has done nothing in step {finished}: "
                    "do the work of each step inside `with step:`"
                )
            elif self._keep_state():
                unused = self._begun
                if self._carried is not None:
                    self._carried.look(finished, self.generations.compared_steps)
                yield finished

    def begin_step(self, step: int) -> None:
        """Begin the step's body, for the first time or again."""
        self._begun += 1
        self.progress.begin_step()
        self._step.begin()
        self.generations.begin_step()
        rng.begin_step(self.given.seed, self.generations.rank, step)
        if self.given.guard is not None:
            self.given.guard.begin_step()
        if self.member is not None:
            channel = self.member.channel
            self._profiler.begin_step(step, channel.settings.profile)
            if channel.injected:
                named = self.generations.named
                inject(channel.injected, step, self.given.model, named["optimizer"])

    def skip_step(self) -> None:
        """Return to the state from before this step, which then counts without an update.

        Raises SessionError: a part of the state has no copy, or too many steps are skipped.
        """
        guard, step = self.given.guard, self.state.finished
        assert guard is not None
        reason = guard.reason
        if not self.repairs.before.restore():
            raise SessionError(
                f"guard: {reason}, and step {step} has changed large tensors before its update, of "
                "which there is no copy: change them after optimizer.step(), or leave guard out"
            )
        self.generations.begin_anew()
        guard.skip(step)
        if self.member is None:
            say(f"step {step} is skipped: {reason}")
        elif self.generations.place.writes:
            self.member.step_skipped(reason)

    def end_step(self) -> None:
        """End a successful step: the state now includes one more step."""
        self.generations.updates.end_step()
        self.repairs.device.wait()  # until the device has done the update
        self._check_state()
        finished = self.state.finished + 1
        self.repairs.times.at(finished)  # the step may have called no optimizer
        self.state.step_done(finished, self.generation)
        if self.generations.own is not None:
            self.generations.own.step_done(StateId(finished, self.generation))
        self.data.advance()
        self.progress.end_step(finished)
        self._profiler.end_step()
        self._step.end(finished)
        if self.member is None:
            return
        self.member.step_done()
        self.generations.groups.step_done()
        last = finished == self.progress.total
        self.generations.digests.step_done(StateId(finished, self.generation), last=last)
        if not self.data.epochs.is_used:
            self.keep(last=last)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a function between two steps that all ranks run, with its state from before it."""
        self._step.begin()
        with self.progress.at(RankActivity.EVALUATE):
            yield
        self._step.end(self.state.finished)

    def loading(self) -> AbstractContextManager[None]:
        """Return the context of a wait for a batch."""
        return self._profiler.loading()

    def _writer(self, channel: Channel, place: RankPlace) -> TorchSnapshotWriter:
        generations = self.generations
        return TorchSnapshotWriter(
            channel, place, values=generations.values, compared=generations.digests.compared
        )

    def _check_state(self) -> None:
        """Check in the first steps that the state is complete, and that a snapshot can hold it.

        Raises SessionError: it is not; the step does not count.
        """
        if self.generations.compared_steps >= LAST:
            self._forgotten = None  # a replacement runs the text that its former process ran
        if self._forgotten is not None:
            self._forgotten.look(self.state.finished)
            capture(self.generations.everything)
            self.generations.compared_steps += 1

    def leave_step(self, error: BaseException, *, inside: bool = True) -> bool:
        """Handle an error of the step's body; True: the rank forms the next generation.

        inside: the state from before the step returns. Returns when the generation has ended;
        False: the error is the script's.
        """
        if inside:
            self._step.break_off()
        member = self.member
        if member is None:
            return False
        check_use(error)
        kind = kind_of(error, self.given.transient)
        if kind is None and not member.is_over and not self._ends_soon(member, error):
            return False
        if self.progress.page.in_update:
            self.state.tear()
        self.repairs.note(kind or FaultKind.LINK, error)
        member.break_off(kind, error)
        return True

    def _ends_soon(self, member: Member, error: BaseException) -> bool:
        """Return whether an unknown error is the first sign of the generation's end.

        Drivers change their texts, and a script can make a mistake while it handles a fault. A rank
        must survive a peer's failure also then.
        """
        accelerator = self.generations.device.type != "cpu"
        if not may_come_from_peers(error, accelerator=accelerator):
            return False
        return member.channel.is_over_within(member.generation, NOTICE_S)

    def _keep_state(self) -> bool:
        """Keep the state from before the step; False: a fault appeared."""
        try:
            if self.member is not None or self.given.guard is not None:
                self.repairs.before.keep()
        except Exception as error:  # devices report their faults late
            if not self.leave_step(error):
                raise
            return False
        return True

    def keep(self, *, last: bool, leaves: bool = False, alone: bool = False) -> None:
        """Take a snapshot if one is due. A checkpoint is due after the last step of the run.

        leaves: the script has left its loop, and other ranks may train. alone: other ranks may have
        passed this place. Raises RuntimeError, as collectives do: a rank is lost.
        """
        every = self.generations.checkpoint_every
        if self._snapshot_schedule.is_idle(self.state.finished, every, last=last):
            return
        with self.progress.at(RankActivity.CHECKPOINT):
            whole = self.generations.complete(
                self._snapshot_schedule, last=last, leaves=leaves, alone=alone
            )
            self._snapshot_schedule.keep(
                self.generations.kept,
                whole=whole,
                place=self.generations.place,
                step=self.state.finished,
                last=last,
                position=self.data.position(),
                metrics=self.records.numbers_of(self.state.finished - 1),
            )

    def _is_left(self) -> bool:
        """Return whether this rank is in no generation: its last one ended or dismissed all ranks.

        Dismissed ranks meet again when the script requests more steps.
        """
        assert self.member is not None
        again = self.member.session_ended and self.state.finished < self.progress.total
        return again or self.member.is_over


class Step:
    """A step. Do all work of the step, with all its collectives, inside `with step:`.

    number: counts from 0. indices: this rank's samples, if the Session has a sampler.
    """

    def __init__(self, loop: Loop, number: int) -> None:
        self._loop = loop
        self.number = number
        self._metrics: dict[str, Any] = {}
        self._late: dict[str, torch.Tensor] = {}
        self._parts: Parts | None = None

    @property
    def indices(self) -> list[int]:
        """This rank's samples of this step. A repeated step has the same samples.

        Raises SessionError: the Session has no sampler, or keeps the global batch.
        """
        sampler = self._sampler("indices")
        if self._loop.given.keep_global_batch:
            raise SessionError(f"step.indices: {_IN_PARTS} part.indices, {_WEIGHTED}")
        return sampler.indices()

    @property
    def batch(self) -> Any:
        """This rank's batch of this step. A repeated step has the same samples.

        Use it inside `with step:`, in each step on every rank.
        Raises SessionError: the Session has no loader, or keeps the global batch.
        """
        if self._loop.given.keep_global_batch:
            raise SessionError(f"step.batch: {_IN_PARTS} part.batch, {_WEIGHTED}")
        return self._loop.data.batch()

    def parts(self) -> Iterator[MicroBatch]:
        """Yield this rank's parts of the step, for one forward and backward pass each.

        Use it inside `with step:`, and finish each part before you take the next. A step has
        several parts only with keep_global_batch=True, when the world is smaller than the full one.
        Raises SessionError: the Session has no sampler.
        """
        data, place = self._loop.data, self._loop.generations
        take = data.take if data.has_loader else None
        self._parts = Parts(place.model, self._sampler("parts()"), take)
        return self._parts.each(
            seed=self._loop.given.seed,
            rank=place.rank,
            world_size=place.world_size,
            step=self.number,
        )

    def log(self, **metrics: Any) -> None:
        """Record values of this step: numbers, texts, lists of them, or tensors.

        A tensor of several numbers becomes a list. Call it before backward: the record then
        survives the loss of the rank. A tensor on a device is read when the step ends, so that
        logging does not wait for the device. Raises SessionError: a value cannot be recorded.
        """
        if self._loop.given.guard is not None:
            self._loop.given.guard.logged(metrics)
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                self._late[name] = value.detach()
            else:
                self._metrics[name] = _plain(value)
        self._write(self._metrics)

    def __enter__(self) -> Step:
        """Begin the step with its own random streams."""
        self._loop.begin_step(self.number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End the step; the Session handles a fault of the generation without an error here."""
        return self.close(error) and error is not None

    def close(self, error: BaseException | None) -> bool:
        """End the step; True: a fault broke it or the guard skips it, and the loop continues."""
        if self._parts is not None:
            self._parts.close()
        guard = self._loop.given.guard
        is_skipped = guard is not None and guard.skips(error)
        if error is not None and not is_skipped:
            return isinstance(error, Exception) and self._loop.leave_step(error)
        try:
            if self._loop.given.keep_global_batch and (self._parts is None or self._parts.left):
                raise SessionError(
                    "keep_global_batch=True: the step ended before the script had used all of "
                    "its parts; loop over step.parts() to the end"
                )
            if not self._loop.data.was_taken:
                raise SessionError(
                    "the script did not use step.batch in this step, so the next step would get "
                    "the same batch; use step.batch in each step"
                )
            if self._late:
                late = {name: _plain(value) for name, value in self._late.items()}
                self._write({**self._metrics, **late})
            if is_skipped:
                self._loop.skip_step()
            self._loop.end_step()
        except Exception as late_error:  # devices report their faults late
            if not self._loop.leave_step(late_error):
                raise
            return True
        return is_skipped

    def _sampler(self, asked: str) -> StepSampler:
        sampler = self._loop.data.sampler
        if sampler is None:
            raise SessionError(f"step.{asked}: give Session a sampler, Session(sampler=...)")
        return sampler

    def _write(self, metrics: Mapping[str, Any]) -> None:
        self._loop.records.write(self.number, self._loop.generation, metrics)


def _plain(value: Any) -> Any:
    """Return a tensor as a number or a list; the float of a float32 keeps it exactly."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value
