"""Which step's training state a rank's process holds."""

from __future__ import annotations

from rekindle.recovery.policy.plan import Made, Source


class HeldState:
    """The step of the state that this process holds.

    finished: steps. made: the generation that did the last of them. whole: the state is that of
    `finished` steps. torn: the state is of no step. Neither holds for a state that the script has
    just built.
    """

    def __init__(self) -> None:
        self.finished = 0
        self.made = 0
        self.whole = False
        self.torn = False

    @property
    def known(self) -> int | None:
        """The finished steps; None: the script has just built the state."""
        return self.finished if self.whole or self.torn else None

    def tear(self) -> None:
        """Record that a fault interrupted a change of the state."""
        self.whole, self.torn = False, True

    def step_done(self, step: int, generation: int) -> None:
        """Record that `generation` finished this step."""
        self.finished, self.made = step, generation

    def replace(self, source: Source) -> None:
        """Record that the rank begins to load another state. A failure leaves the state torn."""
        self.whole, self.torn = False, self.torn or source is not Source.FRESH

    def hold(self, made: Made) -> None:
        """Record that the rank holds this state."""
        self.finished, self.made = made
        self.whole, self.torn = True, False
