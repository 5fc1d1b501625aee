"""What ranks say to be wrong: a fold over the journal, and what it means for a state. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import Made

# What was made after `clean` steps by generations up to this one may be wrong: (generation, clean).
Suspicion = tuple[int, int]


def is_clean(made: Made, suspicions: Iterable[Suspicion]) -> bool:
    """Whether nothing is known against this state."""
    step, generation = made
    return all(generation > told or step <= clean for told, clean in suspicions)


def suspicions(events: Iterable[journal.Event]) -> list[Suspicion]:
    """Return what was told so far, in all attempts, in its order."""
    told = (event for event in events if isinstance(event, journal.Suspected))
    return [(event.generation, event.clean) for event in told]
