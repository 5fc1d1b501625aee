"""Hold the parts of a torch Session, and call them in each step."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch.distributed as dist

from rekindle import names
from rekindle.protocol.heartbeat_page import RankActivity
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.held_state import CurrentStep, HeldState
from rekindle.rank.member import NOTICE_S, Member
from rekindle.rank.progress import ProgressReporter, Records
from rekindle.rank.snapshot_schedule import SnapshotSchedule
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.torch.arguments import Arguments, check_arguments, check_parts
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.session_data import Data
from rekindle.training.torch.faults.injection import inject
from rekindle.training.torch.faults.repairs import kind_of, may_come_from_peers
from rekindle.training.torch.generations import Generations
from rekindle.training.torch.groups.generation_group import leave_for_good
from rekindle.training.torch.profiler import TorchProfiler
from rekindle.training.torch.state.snapshot import TorchSnapshotWriter


class Loop:
    """The training loop of one rank. It ends with the run, and its generations end with faults.

    member: None in a script without an agent.
    """

    def __init__(self, given: Arguments) -> None:
        check_arguments(given.model, given.optimizer)
        self.given = given
        slot, world = rank_environment.slot_of_world()
        device = rank_environment.number("LOCAL_RANK")
        self._profiler = TorchProfiler(slot, device, given.model)
        waits, parts = self._profiler.loading, given.keep_global_batch
        self.data = Data(given.sampler, given.loader, world, waits, in_parts=parts)
        if parts:
            check_parts(self.data.sampler, given.ddp)
        page = rank_environment.page()
        self.progress = ProgressReporter(page)
        self.records = Records(rank_environment.path(names.ENV_METRICS_FILE), page, slot)
        self.state = HeldState()
        self._step = CurrentStep()
        channel = Channel.from_environment()
        self.generations = Generations(
            given,
            self.data,
            channel=channel,
            state=self.state,
            progress=self.progress,
            step=self._step,
        )
        self._repairs = self.generations.repairs
        writer = functools.partial(TorchSnapshotWriter, seed=given.seed)
        self._keeper = SnapshotSchedule(channel, self.generations.place, self._profiler, writer)
        self.member: Member | None = None
        if channel is not None:
            self.member = Member(channel, slot, self.progress, self.state, self.generations)

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
        if self.member is not None:
            if not raised and 0 < self.state.finished < self.progress.total and not self._is_left():
                self._keep(last=True)  # the script has left its loop early
            self.generations.group.leave()
        elif dist.is_initialized():
            leave_for_good()
        self.progress.leave()
        self.data.close()
        self._keeper.close()
        self._profiler.close()
        self.records.close()

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number of each remaining step of `total`; repeat a step that a fault broke."""
        self.progress.asked_for(total)
        while True:
            member, finished = self.member, self.state.finished
            if member is not None and self._is_left():
                if not member.join():
                    return
            elif finished >= total:
                # A new process must not wait at a place that the others have left.
                if member is None or total <= member.passed or not member.join():
                    return
            elif member is not None and member.hold():
                self._repairs.device.free()
            elif self._keep_buffers():
                yield finished

    def begin_step(self, step: int) -> None:
        """Begin the step's body, for the first time or again."""
        self.progress.begin_step()
        self._step.begin()
        self.generations.begin_step()
        rng.begin_step(self.given.seed, self.generations.rank, step)
        if self.member is not None:
            channel = self.member.channel
            self._profiler.begin_step(step, channel.settings.profile)
            if channel.injected:
                named = self.generations.named
                inject(channel.injected, step, self.given.model, named["optimizer"])

    def end_step(self) -> None:
        """End a successful step: the state now includes one more step."""
        self._repairs.device.wait()  # until the device has done the update
        finished = self.state.finished + 1
        self._repairs.times.at(finished)  # the step may have called no optimizer
        self.state.step_done(finished, self.generation)
        self.data.advance()
        self.progress.end_step(finished)
        self._profiler.end_step()
        self._step.end(finished)
        if self.member is None:
            return
        self.member.step_done()
        self.generations.groups.step_done()
        self._keep(last=finished == self.progress.total)

    def leave_step(self, error: BaseException) -> bool:
        """Handle an error of the step's body; True: the rank forms the next generation.

        Returns when the generation has ended; False: the error is the script's.
        """
        self._step.break_off()
        member = self.member
        if member is None:
            return False
        kind = kind_of(error, self.given.transient)
        if kind is None and not member.is_over and not self._ends_soon(member, error):
            return False
        if self.progress.page.in_update:
            self.state.tear()
        self._repairs.note(kind or FaultKind.LINK, error)
        member.break_off(kind, error)
        return True

    def _ends_soon(self, member: Member, error: BaseException) -> bool:
        """Return whether an accelerator's unknown error is the first sign of the generation's end.

        Drivers change their texts. A rank must survive a peer's failure even if the text is
        unknown.
        """
        if self.generations.device.type == "cpu" or not may_come_from_peers(error):
            return False
        return member.channel.is_over_within(member.generation, NOTICE_S)

    def _keep_buffers(self) -> bool:
        """Keep the buffers that the step's forward pass will change; False: a fault appeared."""
        try:
            if self.member is not None:
                self._repairs.buffers.keep()
        except Exception as error:  # devices report their faults late
            if not self.leave_step(error):
                raise
            return False
        return True

    def _keep(self, *, last: bool) -> None:
        """Take a snapshot if one is due. A checkpoint is due after the last step of the run."""
        with self.progress.at(RankActivity.CHECKPOINT):
            self._keeper.keep(
                self.generations.named,
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
        again = self.member.dismissed and self.state.finished < self.progress.total
        return again or self.member.is_over
