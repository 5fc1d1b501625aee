"""Session for MindSpore: `Model.train` whose processes outlive the faults of their peers.

The loop is MindSpore's own. Before each of its steps all ranks pass a gate: one that has a fault
says so there, and nobody enters the step's collectives. All ranks meet, the broken one takes its
state from another, and the same step is done, in the same processes. Where a process is gone, all
are started anew, for MindSpore's collectives can take no new one in.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import mindspore
import msgspec
from mindspore.train import Callback, Model

from rekindle import names
from rekindle.errors import CheckpointError, SessionError, StaleError
from rekindle.profiling.markers import Operation
from rekindle.protocol import agent as protocol
from rekindle.protocol.heartbeat_page import Doing
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.final_snapshot import LastWords, Moment
from rekindle.rank.profiler import Profiler
from rekindle.rank.progress import Progress, phase_of
from rekindle.rank.rank_place import Place
from rekindle.rank.snapshot_schedule import StateKeeper
from rekindle.rank.step_records import Records
from rekindle.rank.step_vote import STATE, Gate, Listener, PeerGoneError, Run
from rekindle.recovery.faults.fault import Kind
from rekindle.recovery.policy.plan import RankPlan, Source
from rekindle.training.mindspore.callbacks import Memory
from rekindle.training.mindspore.injection import suffer
from rekindle.training.mindspore.state import Parameters, ParametersWriter
from rekindle.training.mindspore.steps import Rewind, Settled, Steps, steps_of_epoch
from rekindle.training.mindspore.transfer import fetch, send_state

_GATE = Operation("0", "1", "bool", "barrier", "world")
_LOST = (OSError, PeerGoneError, StaleError)


class Session:
    """Keeps one rank's training alive.

    model: what is trained, with its optimizer; all ranks hold the same state (data parallel).

    rank, world_size: the place in the world. finished: steps finished, of the whole run.

    Started by hand, without an agent, a Session trains the same way but recovers nothing.
    """

    def __init__(self, model: Model) -> None:
        self.rank, self.local_rank = map(rank_environment.number, ("RANK", "LOCAL_RANK"))
        self.world_size = rank_environment.number("WORLD_SIZE", 1)
        self.generation = self.finished = 0
        self._slot = rank_environment.number(names.ENV_SLOT, self.rank)
        self._model = model
        self._parameters = Parameters(model.train_network)
        self._page = rank_environment.page()
        self._progress = Progress(self._page)
        self._channel = Channel.from_environment()
        metrics = rank_environment.path(names.ENV_METRICS_FILE)
        self._records = Records(metrics, self._page, self._slot)
        self._profiler = Profiler(self._slot, self.local_rank)
        self._place = Place(self._slot)
        self._keeper = StateKeeper(self._channel, self._place, self._profiler, ParametersWriter)
        self._listener = Listener()
        self._gate = Gate(self._listener, self._page)
        self._formed = False  # of this generation all is there that the next step needs
        self._made = 0  # the generation that did the last step
        self._whole = self._torn = False  # the state is that of `finished` steps, or of none
        self._stored = False  # the state is one that the store has
        self._reported = False  # the first step of this generation
        self._total = self._passed = 0
        self._run = Run(0, 0)
        self._memory = Memory(())
        self._position: Mapping[str, Any] = {"step": 0}  # what is kept with the state
        self._fetched: Mapping[str, Any] = {}  # the same, of a state that came from elsewhere
        self._last_words: LastWords | None = None

    def __enter__(self) -> Session:
        """Meet the other ranks and take the state that training goes on from."""
        if self._channel is not None:
            self._regroup(self._channel)
            self._last_words = LastWords(self._parameters, self._keep_last)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave; an exception of the script goes its way."""
        if kind is None and self._channel is not None and not self._total:
            told = "rekindle: a Session without session.train(): nothing of it would be recovered"
            print(told, file=sys.stderr, flush=True)
        if self._last_words is not None:
            self._last_words.close()
        self._gate.leave()
        self._listener.close()
        self._progress.leave()
        self._keeper.close()
        self._profiler.close()
        self._records.close()

    def train(
        self,
        epoch: int,
        train_dataset: mindspore.dataset.Dataset,
        callbacks: Callback | Sequence[Callback] | None = None,
        dataset_sink_mode: bool = False,
    ) -> None:
        """Train as `model.train` does with the same.

        It goes on behind the steps that are finished: epoch, step and data are those of a run that
        nothing has broken off. Raises SessionError: there is no step to do, the dataset is to be
        sunk, it was called before, or another rank does other steps or began with other parameters.
        """
        if self._total:
            raise SessionError("session.train() again: one call trains the whole run; give it all")
        per_epoch = steps_of_epoch(epoch, train_dataset, sink=dataset_sink_mode)
        self._total = epoch * per_epoch
        self._run = Run(self._total, 0 if self.finished else self._parameters.digest())
        self._progress.asked_for(self._total)
        others = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        self._memory = Memory(others)
        while True:
            if self._fetched.get("stopped") == self._total:
                self._stop()
            if self.finished < self._total:
                train_dataset.set_init_step(self.finished)
                steps = Steps(self.finished, self._begin_step, self._end_step)
                settled = Settled(self._resume, self._settle, self._profiler)
                try:
                    self._model.train(
                        epoch,
                        train_dataset,
                        callbacks=[steps, *others, settled],
                        dataset_sink_mode=False,
                        initial_epoch=self.finished // per_epoch,
                    )
                except Rewind:
                    continue
                self._leave_early()
            elif self._channel is not None and not self._stored:
                self._keep()  # whoever did the last step has not come to write its checkpoint
            if self._channel is None or not self._meet_at_end(self._channel):
                return

    def _leave_early(self) -> None:
        """A callback has asked MindSpore's loop to stop, maybe."""
        if self.finished < self._total:
            self._stop()
            if self._channel is not None:
                self._keep()

    def _stop(self) -> None:
        """The newest step is the last one."""
        self._total = self.finished
        self._progress.asked_for(self._total)

    def _meet_at_end(self, channel: Channel) -> bool:
        """Whether there are more steps to do: another rank has lost some.

        Raises SessionError: another rank goes on, and would wait for this one for ever.
        """
        try:
            self._gate.agree(self.finished, can=True, ends=True, run=self._run)
        except _LOST as lost:
            self._report(channel, Kind.LINK, lost)
        return self._regroup(channel)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Say what a callback does that takes longer than a step: `with session.phase("evaluate"):`

        name: evaluate, checkpoint or compile. Raises SessionError: another name.
        """
        return self._progress.at(phase_of(name))

    # ---- what MindSpore's loop tells

    def _begin_step(self) -> None:
        """All ranks do the next step, or meet until they can. Raises Rewind: not this one."""
        self._progress.begin_step()
        self._profiler.end_loading()
        if self._channel is not None:
            self._pass_gate(self._channel)
        self._parameters.remember()
        if self._last_words is not None:
            self._last_words.begin_step(self.finished)

    def _end_step(self, loss: float | None) -> None:
        """The graph has run: one more step is finished. Callbacks may still change parameters."""
        if self._last_words is not None:
            self._last_words.end_graph()
        self.finished, self._made = self.finished + 1, self.generation
        if loss is not None:
            self._records.write(self.finished - 1, self.generation, {"loss": loss})
        self._progress.end_step(self.finished)
        self._profiler.end_step()
        if self._channel is None:
            return
        if not self._reported:
            self._reported = True
            place = {"rank": self._slot, "generation": self.generation}
            self._channel.send(protocol.StepDone(finished=self.finished, **place))

    def _resume(self) -> None:
        """All callbacks have begun: give them what they kept, if it came with a state."""
        self._memory.load(self._fetched.get("callbacks", ()))
        self._fetched = {}

    def _settle(self, stops: bool) -> None:
        """All callbacks have seen the step: the state is what the next one begins with.

        stops: there is none, for one of them has said so.
        """
        stopped = {"stopped": self._total} if stops else {}  # another attempt may want more
        self._position = {"step": self.finished, "callbacks": self._memory.state(), **stopped}
        if self._last_words is not None:
            self._last_words.end_step(self.finished)
        if self._channel is not None:
            self._keep()

    def _keep(self) -> None:
        """Take a snapshot if one is due; of the last step of all a checkpoint is."""
        assert self._last_words is not None
        with self._progress.at(Doing.CHECKPOINT), self._last_words.apart:
            self._keeper.keep(
                {"parameters": self._parameters},
                place=replace(self._place, generation=self._made),
                step=self.finished,
                last=self.finished == self._total,
                position=self._position,
                metrics=self._records.numbers_of(self.finished - 1),
            )

    # ---- the gate

    def _pass_gate(self, channel: Channel) -> None:
        """Return when all ranks do this step. Raises Rewind: an earlier one comes first."""
        step = self.finished
        self._profiler.begin_step(step, channel.profile)
        while not self._may_begin(channel):
            self._regroup(channel)
            if self.finished != step:
                raise Rewind
            self._progress.begin_step()
            self._profiler.begin_step(step, channel.profile)

    def _may_begin(self, channel: Channel) -> bool:
        """Whether all ranks do this step; False: the generation is over, because one cannot."""
        damage = suffer(channel.injected, self.finished, self._parameters)
        if damage is not None:
            self._whole, self._torn = False, True
        held = channel.is_held(self.generation)
        can = damage is None and not held and not channel.is_over(self.generation)
        try:
            if self._agree(can):
                return True
        except _LOST as lost:
            if damage is None:
                self._report(channel, Kind.LINK, lost)
                return False
        if damage is not None:
            self._report(channel, Kind.DEVICE_MEMORY, damage)
        elif not channel.hold(self._slot, self.generation, self.finished):
            channel.wait_over(self.generation)
        return False

    def _agree(self, can: bool) -> bool:
        """Meet the others at the gate: the collective in which ranks wait for who is late."""
        if not self._profiler.on.communication:
            return self._gate.agree(self.finished, can=can, run=self._run)
        done = self._profiler.joined(_GATE)
        agreed = self._gate.agree(self.finished, can=can, run=self._run)
        done()
        return agreed

    def _report(self, channel: Channel, kind: Kind, error: BaseException) -> None:
        """Say why this rank cannot go on as it is, and wait until its generation is over."""
        if kind is not Kind.LINK or not channel.is_over(self.generation):
            channel.send(
                protocol.StepFailed(
                    rank=self._slot,
                    generation=self.generation,
                    kind=kind,
                    error=f"{type(error).__name__}: {error}",
                    finished=self.finished,
                )
            )
        channel.wait_over(self.generation)

    # ---- generations

    def _regroup(self, channel: Channel) -> bool:
        """Arrive, and form the next generation; False: all ranks are done."""
        while True:
            self._progress.meet()
            told = self._whole or self._torn
            channel.send(
                protocol.Arrived(
                    rank=self._slot,
                    generation=self.generation,
                    finished=self.finished if told else None,
                    torn=self._torn,
                    made=self._made,
                    done=self._whole and 0 < self._total <= self.finished,
                    passed=self._passed,
                    port=self._listener.port,
                )
            )
            message = channel.wait(self.generation)
            if isinstance(message, protocol.Dismiss):
                self._passed = message.finished
                self._progress.leave()
                return False
            if self._form(channel, message):
                return True

    def _form(self, channel: Channel, form: protocol.Form) -> bool:
        """Form this generation with the state that the plan names; False: it is over already."""
        self._gate.leave()
        self.generation, self._formed = form.generation, False
        self._place = self._place.moved(form)
        self._passed = max(self._passed, form.passed)
        gate = self._gate = Gate(self._listener, self._page)
        channel.on_over = functools.partial(self._over, gate)
        if channel.is_over(form.generation):
            return False
        ready = protocol.StateReady(rank=self._slot, generation=form.generation)
        try:
            gate.form(form.generation, form.ranks[self._slot], form.peers)
            self._take(channel, form, form.plan[self._slot], gate)
        except CheckpointError as error:
            channel.send(msgspec.structs.replace(ready, error=str(error)))
            channel.wait_over(form.generation)
            return False
        except _LOST as error:
            self._report(channel, Kind.LINK, error)
            return False
        self._formed, self._reported = True, False
        self._progress.formed(self.finished)
        channel.send(ready)
        return True

    def _over(self, gate: Gate, over: protocol.Over) -> None:
        """Called by the channel's thread.

        Once the generation is formed it changes nothing: whether the next step is done, all ranks
        have to agree on at its gate.
        """
        if over.generation >= self.generation and not self._formed:
            gate.sever()

    def _take(self, channel: Channel, form: protocol.Form, plan: RankPlan, gate: Gate) -> None:
        """Bring the state to the planned one, and send it to whom the plan names.

        Raises CheckpointError: the source has not what the plan expects; OSError, PeerGoneError,
        StaleError: a peer is lost.
        """
        if plan.source is not Source.SELF:
            self._whole, self._torn = False, self._torn or plan.source is not Source.FRESH
            self._stored = plan.source is Source.CHECKPOINT
            made = form.step, form.made
            self._position = self._fetched = fetch(
                self._parameters, channel, self._slot, plan, made, form.peers, gate
            )
        self.finished, self._made = form.step, form.made
        self._whole, self._torn = True, False
        for peer in plan.sends_to:
            send_state(self._parameters.arrays(), gate.accept(peer, STATE), self._position)

    def _keep_last(self, moment: Moment) -> bool:
        """Give the agent the newest state that there is, for this process has to end."""
        return self._keeper.keep_last(
            {"parameters": self._parameters.before_step if moment.inside else self._parameters},
            place=replace(self._place, generation=self._made),
            step=moment.step,
            position=self._position,
            metrics=self._records.numbers_of(moment.step - 1),
            holds=lambda: moment.holds() and (not moment.inside or self._parameters.are_as_before),
        )
