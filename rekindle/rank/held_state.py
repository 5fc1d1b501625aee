"""The training state in a rank's process: its step, its shard, and the current step."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rekindle.protocol.agent import FormGeneration
from rekindle.recovery.policy.plan import Made, StateSource

LIMIT_S = 0.1  # seconds; the data that the step still needs may be lost with a node


class CurrentStep:
    """The step that the main thread runs. The channel's thread waits for its end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = self._broken = False
        self._finished = 0

    def begin(self) -> None:
        """Record that a step's body begins."""
        self._under_way = True

    def end(self, finished: int) -> None:
        """Record that the step has ended well, and that `finished` steps are finished now."""
        with self._changed:
            self._under_way, self._finished = False, finished
            self._changed.notify_all()

    def break_off(self) -> None:
        """Record that the step raised an error."""
        with self._changed:
            self._under_way, self._broken = False, True
            self._changed.notify_all()

    def take_broken(self) -> bool:
        """Return whether a step broke off since the last call."""
        broken, self._broken = self._broken, False
        return broken

    def wait_end(self, finished: int) -> None:
        """Wait, for LIMIT_S at most, for the end of a step that others have finished.

        finished: the number of steps that they have finished.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._under_way or self._finished >= finished, LIMIT_S
            )


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The rank's place in the world. slot: its number in the full world, which never changes.

    shard: the shard of the state that it holds; None: all ranks hold the same. shards: the number
    of all shards.

    writes: among the ranks with the same state, this rank writes checkpoints. copied: another node
    keeps copies of its snapshots.

    mesh: the sizes of the device mesh that defines the shards, by dimension name. None: only the
    script knows it.
    """

    slot: int
    shard: int | None = None
    generation: int = 0
    shards: int = 1
    writes: bool = False
    copied: bool = False
    mesh: Mapping[str, int] | None = None

    def moved(self, form: FormGeneration) -> RankPlace:
        """Return the place in the generation that is formed."""
        own = form.plan[self.slot]
        return replace(
            self,
            generation=form.generation,
            shards=form.shards,
            writes=own.writes,
            copied=own.replica_node >= 0,
        )


class HeldState:
    """The step of the state that this process holds.

    finished: its number of steps. made: the generation that did the last of them. whole: the state
    belongs to `finished` steps. torn: the state belongs to no step. Both are false for a state that
    the script has just built.
    """

    def __init__(self) -> None:
        self.finished = 0
        self.made = 0
        self.whole = False
        self.torn = False

    @property
    def known(self) -> int | None:
        """The number of finished steps; None: the script has just built the state."""
        return self.finished if self.whole or self.torn else None

    def tear(self) -> None:
        """Record that a fault interrupted a change of the state."""
        self.whole, self.torn = False, True

    def step_done(self, step: int, generation: int) -> None:
        """Record that `generation` finished this step."""
        self.finished, self.made = step, generation

    def replace(self, source: StateSource) -> None:
        """Record that the rank begins to load another state. A failure leaves the state torn."""
        self.whole, self.torn = False, self.torn or source is not StateSource.FRESH

    def hold(self, made: Made) -> None:
        """Record that the rank holds this state."""
        self.finished, self.made = made
        self.whole, self.torn = True, False
