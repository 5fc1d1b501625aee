"""Do a MindSpore rank's part in each generation: its gate and its state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.protocol.rank import FormGeneration, GenerationEnded
from rekindle.rank.channel import Channel
from rekindle.rank.held_state import HeldState, RankPlace
from rekindle.rank.member import Arrival
from rekindle.rank.progress import ProgressReporter
from rekindle.rank.step_vote import LOST, STATE, Listener, StepVote
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.plan import StateSource
from rekindle.training.mindspore.state import Parameters
from rekindle.training.mindspore.transfer import fetch, send_state


class Generations:
    """Forms the generations of one rank; an adapter of `rekindle.rank.member.Member`.

    place: the rank's place, which decides who writes the state. position: the values that the
    snapshots keep with the state. fetched: the position of a state that came from another source.
    stored: the store has the state.
    """

    def __init__(
        self,
        slot: int,
        parameters: Parameters,
        channel: Channel | None,
        state: HeldState,
        progress: ProgressReporter,
    ) -> None:
        self.place = RankPlace(slot)
        self.position: Mapping[str, Any] = {"step": 0}
        self.fetched: Mapping[str, Any] = {}
        self.stored = False
        self.listener = Listener()
        self.gate = StepVote(self.listener, progress.page)
        self._parameters = parameters
        self._channel = channel
        self._state = state
        self._progress = progress
        self._formed = False

    def arrival(self) -> Arrival:
        """Return the values that MindSpore adds to `Arrived`."""
        done = self._state.whole and 0 < self._progress.total <= self._state.finished
        return Arrival(done, port=self.listener.port)

    def recover(self) -> None:
        """Do nothing: the end of a generation leaves the device as it is."""

    def enter(self, form: FormGeneration) -> Callable[[GenerationEnded], None]:
        """Leave the former generation's gate; return a function that ends this one's forming."""
        self.gate.leave()
        self._formed = False
        self.place = self.place.moved(form)
        self.gate = StepVote(self.listener, self._progress.page)
        return functools.partial(self._stop, self.gate)

    def form(self, form: FormGeneration) -> None:
        """Meet the other ranks, and take the state that the plan names."""
        assert self._channel is not None
        slot = self.place.slot
        plan = form.plan[slot]
        made = form.step, form.made
        self.gate.form(form.generation, form.ranks[slot], form.peers)
        if plan.source is not StateSource.SELF:
            self._state.replace(plan.source)
            self.stored = plan.source is StateSource.CHECKPOINT
            self.position = self.fetched = fetch(
                self._parameters, self._channel, slot, plan, made, form.peers, self.gate
            )
        self._state.hold(made)
        for peer in plan.sends_to:
            send_state(self._parameters.arrays(), self.gate.accept(peer, STATE), self.position)
        self._formed = True

    def failed(self, error: BaseException) -> FaultKind | None:
        """Return LINK if another rank is lost, and None otherwise."""
        return FaultKind.LINK if isinstance(error, LOST) else None

    def close(self) -> None:
        """Leave the gate, and accept no more connections."""
        self.gate.leave()
        self.listener.close()

    def _stop(self, gate: StepVote, _: GenerationEnded) -> None:
        """End the forming.

        The gate of a formed generation stays open: all ranks agree there whether they do the next
        step.
        """
        if not self._formed:
            gate.sever()
