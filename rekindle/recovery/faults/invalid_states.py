"""Find states that ranks report as invalid: a fold over the journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import Made

# (generation, clean): states after `clean` steps, of generations up to this one, may be invalid.
Suspicion = tuple[int, int]


def is_clean(made: Made, suspicions: Iterable[Suspicion]) -> bool:
    """Return whether no report concerns this state."""
    step, generation = made
    return all(generation > told or step <= clean for told, clean in suspicions)


def suspicions(events: Iterable[journal.Event]) -> list[Suspicion]:
    """Return the reports of all attempts, in order."""
    told = (event for event in events if isinstance(event, journal.Suspected))
    return [(event.generation, event.clean) for event in told]
