"""The line of the run: what may be put together, and what may be wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery import journal
from rekindle.recovery.fault import Fault, Kind
from rekindle.recovery.lineage import Lineage

began = st.lists(st.integers(0, 9), max_size=8)  # the steps that generations 1, 2, ... went on from
states = st.tuples(st.integers(0, 9), st.integers(0, 8))  # step, generation


def formed(generation: int, step: int, source: str = "self") -> journal.Formed:
    return journal.Formed(
        generation=generation, world_size=2, step=step, sources={source: 2}, newest=step
    )


def suspect(clean: int) -> journal.FaultSeen:
    fault = Fault(kind=Kind.DEVICE_MEMORY, message="ECC", clean=clean)
    return journal.FaultSeen(incident=1, fault=fault)


@given(began, states)
def test_a_state_is_of_the_line_unless_a_later_generation_began_before_it(
    steps: list[int], state: tuple[int, int]
) -> None:
    """The rule itself, looked up in every generation."""
    line = Lineage(formed(number, step) for number, step in enumerate(steps, start=1))
    step, generation = state
    later = [at for number, at in enumerate(steps, start=1) if number > generation]
    assert line.has(step, generation) == all(at >= step for at in later)
    assert line.generation == len(steps)


@given(began, st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), max_size=4), states)
def test_what_was_made_after_a_suspect_step_is_not_clean(
    steps: list[int], faults: list[tuple[int, int]], state: tuple[int, int]
) -> None:
    """By the generations up to the fault; what later ones made anew is."""
    faults = [(min(generation, len(steps)), clean) for generation, clean in faults]
    events: list[journal.Event] = []
    for number, at in enumerate([0, *steps]):
        events += [formed(number, at)] if number else []
        events += [suspect(clean) for generation, clean in faults if generation == number]
    step, generation = state
    told = [clean for fault, clean in faults if generation <= fault]
    assert Lineage(events).is_clean(step, generation) == all(step <= clean for clean in told)
    assert Lineage(events).limit(generation) == min(told, default=None)


def test_ranks_without_a_session_are_of_no_line() -> None:
    """A script that was started again has no step that the job knows; its number counts."""
    line = Lineage([formed(1, 0), formed(2, 0, "script")])
    assert line.has(7, 1)
    assert line.generation == 2


@pytest.mark.parametrize("step", [3, 4])
def test_what_was_left_behind_stays_behind(step: int) -> None:
    """Even when training has come further again."""
    line = Lineage([formed(1, 0), formed(2, 3), formed(3, 9)])
    assert line.has(step, 1) == (step <= 3)
    assert line.has(step, 2)
