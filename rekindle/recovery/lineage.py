"""How the states of a run are related: a fold over its generations. Pure.

A generation goes on from a state, and what was made beyond that is left behind: it is made again,
perhaps not bit by bit the same. So a state is named by its step and the generation that did it
(`Made`). A rank may tell that what was made after some step is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.recovery import journal
from rekindle.recovery.plan import Made

SCRIPT = "script"  # the source of ranks without a Session: their state is their own business

# What was made after `clean` steps by generations up to this one may be wrong: (generation, clean).
Suspicion = tuple[int, int]


def is_clean(made: Made, suspicions: Iterable[Suspicion]) -> bool:
    """Whether nothing is known against this state."""
    step, generation = made
    return all(generation > told or step <= clean for told, clean in suspicions)


class Lineage:
    """The generations formed so far, of all attempts.

    generation: the newest. suspicions: in the order in which they were told.
    """

    def __init__(self, events: Iterable[journal.Event] = ()) -> None:
        self.generation = 0
        self.suspicions: list[Suspicion] = []
        self._began: dict[int, Made] = {}  # the states that generations went on from
        for event in events:
            match event:
                case journal.Formed(sources=sources) if SCRIPT in sources:
                    self.generation = max(self.generation, event.generation)
                case journal.Formed():
                    self.formed(event.generation, (event.step, event.made))
                case journal.Suspected():
                    self.suspicions.append((event.generation, event.clean))
                case _:
                    pass

    def formed(self, generation: int, made: Made) -> None:
        """A generation goes on from this state."""
        self.generation = max(self.generation, generation)
        self._began[generation] = made

    def name(self, step: int, generation: int) -> Made:
        """Name the state of `step` that a rank of this generation has: who has done that step?"""
        while generation in self._began:
            began, before = self._began[generation]
            if step > began or before >= generation:
                break
            generation = before
        return step, generation
