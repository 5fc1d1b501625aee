"""Which states belong together: the line of the run, a fold over its generations. Pure.

A generation goes on from a step, and what was made beyond it by earlier ones is left behind: it is
made again, perhaps not bit by bit the same. A state is named by its step (how many are finished)
and the generation that made it.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.recovery import journal

SCRIPT = "script"  # the source of ranks without a Session: their state is their own business


class Lineage:
    """The generations formed so far, of all attempts.

    generation: the newest.
    """

    def __init__(self, events: Iterable[journal.Event] = ()) -> None:
        self.generation = 0
        # (generation, the step it went on from), both rising: an earlier generation that went on
        # from a later step says nothing that a later one does not.
        self._began: list[tuple[int, int]] = []
        self._suspected: list[tuple[int, int]] = []  # (generation, the newest step that is clean)
        for event in events:
            match event:
                case journal.Formed(sources=sources) if SCRIPT in sources:
                    self.generation = max(self.generation, event.generation)
                case journal.Formed():
                    self.formed(event.generation, event.step)
                case journal.FaultSeen(fault=fault) if fault.clean is not None:
                    self.suspect(fault.clean)
                case _:
                    pass

    def formed(self, generation: int, step: int) -> None:
        """A generation goes on from this step."""
        self.generation = max(self.generation, generation)
        while self._began and self._began[-1][1] >= step:
            self._began.pop()
        self._began.append((generation, step))

    def suspect(self, clean: int) -> None:
        """What was made after `clean` steps, up to now, may be wrong wherever it is."""
        self._suspected.append((self.generation, clean))

    def has(self, step: int, generation: int) -> bool:
        """Whether this state is of the line, so that it may be put together with others of it."""
        began = (at for formed, at in self._began if formed > generation)
        return step <= next(began, step)

    def is_clean(self, step: int, generation: int) -> bool:
        """Whether nothing is known against this state."""
        clean = self.limit(generation)
        return clean is None or step <= clean

    def limit(self, generation: int) -> int | None:
        """The newest step of what this generation, or one before it, has made that is clean."""
        return min((clean for made, clean in self._suspected if made >= generation), default=None)
