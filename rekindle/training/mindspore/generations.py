"""Do a MindSpore rank's part in each generation: its gate and its state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.protocol.rank import FormGeneration, GenerationEnded
from rekindle.rank.channel import Channel
from rekindle.rank.member import Arrival
from rekindle.rank.progress import HeldState, ProgressReporter, RankPlace
from rekindle.rank.step_vote import STATE, StepVote, VotingGenerations
from rekindle.recovery.policy.plan import StateId, StateSource
from rekindle.training.mindspore.state import Parameters
from rekindle.training.mindspore.transfer import fetch, send_state


class Generations(VotingGenerations):
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
        super().__init__(state, progress)
        self.place = RankPlace(slot)
        self.position: Mapping[str, Any] = {"step": 0}
        self.fetched: Mapping[str, Any] = {}
        self.stored = False
        self._parameters = parameters
        self._channel = channel

    def arrival(self) -> Arrival:
        """Return the values that MindSpore adds to `Arrived`."""
        done = self._state.whole and 0 < self._progress.total <= self._state.finished
        return Arrival(done, port=self.listener.port)

    def recover(self) -> None:
        """Do nothing: the end of a generation leaves the device as it is."""

    def enter(self, form: FormGeneration) -> Callable[[GenerationEnded], None]:
        """Leave the former generation's gate; return a function that ends this one's forming."""
        self.place = self.place.moved(form)
        return functools.partial(self._stop, self._new_gate())

    def form(self, form: FormGeneration) -> None:
        """Meet the other ranks, and take the state that the plan names."""
        assert self._channel is not None
        slot = self.place.slot
        plan = form.plan[slot]
        state = StateId(form.step, form.state_generation)
        self.gate.form(form.generation, form.ranks[slot], form.peers)
        if plan.source is not StateSource.SELF:
            self._state.replace(plan.source)
            self.stored = plan.source is StateSource.CHECKPOINT
            self.position = self.fetched = fetch(
                self._parameters, self._channel, slot, plan, state, form.peers, self.gate
            )
        self._state.hold(state)
        for peer in plan.sends_to:
            send_state(self._parameters.arrays(), self.gate.accept(peer, STATE), self.position)
        self.formed = True

    def _stop(self, gate: StepVote, _: GenerationEnded) -> None:
        """End the forming.

        The gate of a formed generation stays open: all ranks agree there whether they do the next
        step.
        """
        if not self.formed:
            gate.sever()
