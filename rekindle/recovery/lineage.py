"""What the journal says of a run's states: how many generations there were, and what may be wrong.

Pure. A generation goes on from a state, and what was made beyond that is left behind: it is made
again, perhaps not bit by bit the same. So a state is named by its step and the generation that did
it (`Made`), and what a rank says to be wrong is said of steps and generations.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.recovery import journal
from rekindle.recovery.plan import Made

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
        for event in events:
            match event:
                case journal.Formed():
                    self.generation = max(self.generation, event.generation)
                case journal.Suspected():
                    self.suspicions.append((event.generation, event.clean))
                case _:
                    pass
