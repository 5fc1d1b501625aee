"""Session for MindSpore: `Model.train` whose processes survive the faults of their peers.

The loop is MindSpore's own. All ranks pass a gate before each of its steps. A rank with a fault
reports it at the gate, and no rank enters the step's collectives. After an error of the device that
leaves `Model.train`, a rank does not answer at the gate. All ranks meet, and the failed rank takes
its state from another rank. Then they do the next step in the same processes. If a process is lost,
Rekindle restarts all processes, because MindSpore's collectives admit no new one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import mindspore
from mindspore import nn, ops
from mindspore.train import Callback, Model

from rekindle import names
from rekindle.console import say
from rekindle.errors import SessionError
from rekindle.profiling.markers import Operation
from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.protocol.heartbeat_page import RankActivity
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.injection import break_process, due
from rekindle.rank.member import Member
from rekindle.rank.profiler import Profiler
from rekindle.rank.progress import HeldState, ProgressReporter, Records, phase_of
from rekindle.rank.snapshot_schedule import FinalSnapshot, Moment, SnapshotSchedule
from rekindle.rank.step_vote import LOST, RunIdentity
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.mindspore.faults import device_for, kind_of, spread
from rekindle.training.mindspore.mindspore_generations import MindSporeGenerations
from rekindle.training.mindspore.state import Parameters, ParametersWriter
from rekindle.training.mindspore.steps import (
    CallbackState,
    Rewind,
    Settled,
    Steps,
    check_model,
    move_data,
    pace_of,
)

_GATE = Operation("0", "1", "bool", "barrier", "world")


class _Alone(nn.Cell):  # type: ignore[misc]  # MindSpore is absent where types are checked
    """A collective that one rank calls alone, so that it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, value: mindspore.Tensor) -> mindspore.Tensor:
        return self.all_reduce(value)


def inject(faults: list[Inject], step: int, parameters: Parameters) -> RuntimeError | None:
    """Inject those of `faults` that are due in `step`, and remove them from the list.

    Return the error that broke the state; None: no fault broke it. Errors that stand for the
    script's own errors are raised.
    """
    for fault, text in due(faults, step):
        match fault.kind:
            case InjectionKind.UCE | InjectionKind.TORN_UPDATE:
                parameters.spoil()
                return RuntimeError(f"UCE ERROR {text}")
            case InjectionKind.HANG_COLLECTIVE:
                _Alone()(mindspore.Tensor([1.0], mindspore.float32))
            case InjectionKind.HANG_DATA:
                os.read(os.pipe()[0], 1)
            case InjectionKind.OOM:
                raise MemoryError(f"out of memory was {text}")
            case _ if not break_process(fault):
                raise RuntimeError(f"an exception was {text}")
    return None


class Session:
    """Keeps one rank's training alive.

    model: the model with its optimizer. All ranks hold the same state (data parallel).

    rank, world_size: rank and size of the world. finished: finished steps of the whole run.

    Without an agent (a script that a user starts directly), a Session trains in the same way but
    recovers nothing.
    """

    def __init__(self, model: Model) -> None:
        self.rank, self.local_rank = map(rank_environment.number, ("RANK", "LOCAL_RANK"))
        self.world_size = rank_environment.number("WORLD_SIZE", 1)
        slot = rank_environment.slot_of_world()[0]
        if self.world_size > 1:  # a single rank has the complete state in each mode
            check_model(model)
        self._model = model
        self._parameters = Parameters(model.train_network)
        page = rank_environment.page()
        self._progress = ProgressReporter(page)
        self._state = HeldState()
        channel = Channel.from_environment()
        self._generations = MindSporeGenerations(
            slot,
            self._parameters,
            device_for(model.train_network),
            channel,
            self._state,
            self._progress,
        )
        self._member: Member | None = None
        if channel is not None:
            self._member = Member(channel, slot, self._progress, self._state, self._generations)
        self._records = Records(rank_environment.path(names.ENV_METRICS_FILE), page, slot)
        self._profiler = Profiler(slot, self.local_rank)
        place = self._generations.place
        self._snapshot_schedule = SnapshotSchedule(channel, place, self._profiler, ParametersWriter)
        self._run = RunIdentity(0, 0)
        self._callback_state = CallbackState(())
        self._final_snapshot = FinalSnapshot(self._parameters, self._keep_last)

    @property
    def finished(self) -> int:
        """The finished steps of the whole run."""
        return self._state.finished

    @property
    def generation(self) -> int:
        """The number of this generation; 0 without an agent."""
        return self._member.generation if self._member is not None else 0

    def __enter__(self) -> Session:
        """Meet the other ranks and take the state from which training continues."""
        if self._member is not None:
            self._member.join()
            self._final_snapshot.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the training. An exception of the script passes through."""
        if kind is None and self._member is not None and not self._progress.total:
            say(
                "the script has a Session but did not call session.train(), so Rekindle could not "
                "recover its state"
            )
        self._final_snapshot.close()
        self._generations.close()
        self._progress.leave()
        self._snapshot_schedule.close()
        self._profiler.close()
        self._records.close()

    def train(
        self,
        epoch: int,
        train_dataset: mindspore.dataset.Dataset,
        callbacks: Callback | Sequence[Callback] | None = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
    ) -> None:
        """Train as `model.train` does with the same arguments.

        epoch: number of epochs of the whole run. train_dataset: the dataset. callbacks: callbacks
        of MindSpore. dataset_sink_mode: only on NPUs (never run); each sink is then one step.
        sink_size: batches of a sink; -1: those of an epoch.

        Training continues after the finished steps. Epoch, step and data are the same as in a run
        without faults. Raises SessionError: no step is left, the device cannot sink data, it was
        called before, or another rank has other steps or other initial parameters.
        """
        if self._progress.total:
            raise SessionError(
                "the script called session.train() twice; make one call for the whole run"
            )
        pace = pace_of(epoch, train_dataset, sink=dataset_sink_mode, sink_size=sink_size)
        self._progress.asked_for(epoch * pace.per_epoch)
        begins = 0 if self.finished else self._parameters.digest()
        self._run = RunIdentity(self._progress.total, begins)
        others = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        self._callback_state = CallbackState(others)
        while True:
            if self._generations.fetched.get("stopped") == self._progress.total:
                self._stop()
            if self.finished < self._progress.total:
                batches = self.finished * pace.batches
                move_data(train_dataset, batches)
                steps = Steps(batches, self._begin_step, self._end_step)
                settled = Settled(self._resume, self._settle, self._profiler)
                try:
                    self._model.train(
                        epoch,
                        train_dataset,
                        callbacks=[steps, *others, settled],
                        dataset_sink_mode=dataset_sink_mode,
                        sink_size=sink_size,
                        initial_epoch=self.finished // pace.per_epoch,
                    )
                except Rewind:
                    continue
                except RuntimeError as error:
                    if not self._leave_broken_step(error):
                        raise
                    if self._member is not None and self._member.session_ended:
                        return
                    continue
                self._leave_early()
            elif self._member is not None and not self._generations.stored:
                self._keep()  # the rank that did the last step did not write its checkpoint
            if self._member is None or not self._meet_at_end(self._member):
                return

    def _leave_broken_step(self, error: RuntimeError) -> bool:
        """Meet the other ranks after an error of the device; False: this process must end."""
        kind, member, generations = kind_of(error), self._member, self._generations
        if kind is None or member is None:
            return False
        self._final_snapshot.end_graph()  # the state belongs to no step
        if not generations.break_step(kind, spread=spread(error)):
            say(
                "this device cannot leave a collective that another rank may still be in, so all "
                "ranks restart; only a graph whose optimizers are all recoverable() shows that its "
                "collectives are done"
            )
            return False
        if generations.position["step"] != self.finished:
            self._state.tear()  # not all callbacks have seen the newest step
        member.break_off(kind, error)
        # The others wait at the gate of the next step. This rank does not answer, so none passes.
        generations.gate.sever()
        member.join()
        # The callbacks reset their values when the loop begins again, also if the state stays.
        generations.fetched = generations.position
        return True

    def _leave_early(self) -> None:
        """End the run at the newest step if a callback has stopped MindSpore's loop."""
        if self.finished < self._progress.total:
            self._stop()
            if self._member is not None:
                self._keep()

    def _stop(self) -> None:
        """Make the newest step the last one."""
        self._progress.asked_for(self.finished)

    def _meet_at_end(self, member: Member) -> bool:
        """Return whether more steps follow, because another rank has lost some.

        Raises SessionError: another rank has more steps, and would wait for this rank without end.
        """
        try:
            self._generations.gate.agree(self.finished, can=True, ends=True, run=self._run)
        except LOST as lost:
            member.break_off(FaultKind.LINK, lost)
        return member.join()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Mark work that takes longer than a step: `with session.phase("evaluate"):`

        name: `evaluate`, `checkpoint` or `compile`. Raises SessionError: another name.
        """
        return self._progress.at(phase_of(name))

    # ---- MindSpore's loop calls these

    def _begin_step(self) -> None:
        """Begin the next step with all ranks, or meet until they can. Raises Rewind: not this."""
        self._progress.begin_step()
        self._profiler.end_loading()
        if self._member is not None:
            self._pass_gate(self._member)
        self._parameters.remember()
        self._final_snapshot.begin_step(self.finished)
        self._generations.step.begin()

    def _end_step(self, loss: float | None) -> None:
        """Count one more finished step after the graph. Callbacks may still change parameters."""
        self._generations.end_step()
        self._final_snapshot.end_graph()
        self._state.step_done(self.finished + 1, self.generation)
        if loss is not None:
            self._records.write(self.finished - 1, self.generation, {"loss": loss})
        self._progress.end_step(self.finished)
        self._profiler.end_step()
        if self._member is not None:
            self._member.step_done()

    def _resume(self) -> None:
        """Give the callbacks their kept values, if they came with a state; all have begun."""
        self._callback_state.load(self._generations.fetched.get("callbacks", ()))
        self._generations.fetched = {}

    def _settle(self, stops: bool) -> None:
        """Keep the state with which the next step begins; all callbacks have seen the step.

        stops: no step follows, because a callback has requested the end.
        """
        stopped = {"stopped": self._progress.total} if stops else {}  # the steps of this attempt
        self._generations.position = {
            "step": self.finished,
            "callbacks": self._callback_state.state(),
            **stopped,
        }
        self._final_snapshot.end_step(self.finished)
        if self._member is not None:
            self._keep()

    def _keep(self) -> None:
        """Take a snapshot if one is due. A checkpoint is due after the last step of the run."""
        with self._progress.at(RankActivity.CHECKPOINT), self._final_snapshot.apart:
            self._snapshot_schedule.keep(
                {"parameters": self._parameters},
                place=replace(self._generations.place, generation=self._state.generation),
                step=self.finished,
                last=self.finished == self._progress.total,
                position=self._generations.position,
                metrics=self._records.numbers_of(self.finished - 1),
            )

    # ---- the gate

    def _pass_gate(self, member: Member) -> None:
        """Return when all ranks do this step. Raises Rewind: an earlier step comes first."""
        step = self.finished
        self._profiler.begin_step(step, member.channel.settings.profile)
        while not self._may_begin(member):
            member.join()
            if self.finished != step:
                raise Rewind
            self._progress.begin_step()
            self._profiler.begin_step(step, member.channel.settings.profile)

    def _may_begin(self, member: Member) -> bool:
        """Return whether all ranks do this step; False: one cannot, and the generation is over."""
        damage = inject(member.channel.injected, self.finished, self._parameters)
        if damage is not None:
            self._state.tear()
        try:
            if self._agree(damage is None and not member.is_held and not member.is_over):
                return True
        except LOST as lost:
            if damage is None:
                member.break_off(FaultKind.LINK, lost)
                return False
        if damage is not None:
            member.break_off(FaultKind.DEVICE_MEMORY, damage)
        elif not member.hold():
            member.channel.wait_over(member.generation)
        return False

    def _agree(self, can: bool) -> bool:
        """Meet the other ranks at the gate, where they wait for a late rank."""
        gate = self._generations.gate
        if not self._profiler.on.communication:
            return gate.agree(self.finished, can=can, run=self._run)
        done = self._profiler.joined(_GATE)
        agreed = gate.agree(self.finished, can=can, run=self._run)
        done()
        return agreed

    def _keep_last(self, moment: Moment) -> bool:
        """Give the agent the newest state, because this process must end."""
        return self._snapshot_schedule.keep_last(
            {"parameters": self._parameters.before_step if moment.inside else self._parameters},
            place=replace(self._generations.place, generation=self._state.generation),
            step=moment.step,
            position=self._generations.position,
            metrics=self._records.numbers_of(moment.step - 1),
            holds=lambda: moment.holds() and (not moment.inside or self._parameters.are_as_before),
        )
