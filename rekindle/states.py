"""Identify training states, and find the states that may be invalid. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# (generation, steps): states after `steps` steps, of generations up to this one, may be invalid.
Suspicion = tuple[int, int]


class StateId(NamedTuple):
    """Identify a state by its number of finished steps and the generation that did the last one.

    A later generation may repeat a step with slightly different results, which makes another state.
    """

    step: int
    generation: int


def is_clean(state: StateId, suspicions: Iterable[Suspicion]) -> bool:
    """Return whether no report concerns this state."""
    step, generation = state
    return all(generation > until or step <= steps for until, steps in suspicions)
