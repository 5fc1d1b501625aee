"""How states are related: who has done a step, and what may be wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery import journal
from rekindle.recovery.lineage import Lineage, is_clean

# What generations 1, 2, ... went on from: a step, and how many generations ago that was done.
began = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=8)


def formed(generation: int, step: int, made: int, source: str = "self") -> journal.Formed:
    return journal.Formed(
        generation=generation,
        world_size=2,
        step=step,
        made=made,
        sources={source: 2},
        newest=step,
    )


def line_of(steps: list[tuple[int, int]]) -> Lineage:
    events = []
    for number, (step, ago) in enumerate(steps, start=1):
        events.append(formed(number, step, max(0, number - ago)))
    return Lineage(events)


@given(began, st.integers(0, 9), st.integers(0, 8))
def test_the_one_who_has_done_a_step(
    steps: list[tuple[int, int]], step: int, generation: int
) -> None:
    """Looked up from generation to generation: it began before that step."""
    made = line_of(steps).name(step, generation)
    while 0 < generation <= len(steps) and step <= steps[generation - 1][0]:
        generation = max(0, generation - steps[generation - 1][1])
    assert made == (step, generation)


@given(began, st.integers(0, 9), st.integers(0, 8))
def test_a_name_is_the_name_of_itself(
    steps: list[tuple[int, int]], step: int, generation: int
) -> None:
    """So that what ranks, agents and the store say of a state can be compared."""
    line = line_of(steps)
    made = line.name(step, generation)
    assert line.name(*made) == made


def test_a_step_that_is_done_again() -> None:
    """Generation 2 does steps 4 to 9 again, generation 3 goes on from the old step 6."""
    line = Lineage([formed(1, 0, 0), formed(2, 3, 1), formed(3, 6, 1)])
    assert [line.name(6, generation) for generation in (1, 2, 3)] == [(6, 1), (6, 2), (6, 1)]
    assert [line.name(3, generation) for generation in (1, 2, 3)] == [(3, 1)] * 3
    assert line.name(7, 3) == (7, 3)


def test_a_journal_that_was_lost() -> None:
    """Its generations begin anew, with checkpoints of higher ones: no search goes in circles."""
    line = Lineage([formed(1, 30, 5), formed(5, 50, 4)])
    assert line.name(30, 1) == (30, 1)
    assert line.name(40, 5) == (40, 4)


def test_ranks_without_a_session_have_no_state() -> None:
    """A script that was started again has no step that the job knows; its number counts."""
    line = Lineage([formed(1, 0, 0), formed(2, 0, 0, "script")])
    assert line.name(7, 2) == (7, 2)
    assert line.generation == 2


@pytest.mark.parametrize(
    ("made", "clean"), [((7, 1), True), ((8, 1), False), ((8, 2), False), ((8, 3), True)]
)
def test_what_a_rank_says_to_be_wrong(made: tuple[int, int], clean: bool) -> None:
    """Of the generations up to that one; what later ones made anew is right."""
    events = [formed(1, 0, 0), formed(2, 5, 1), journal.Suspected(generation=2, clean=7, rank=1)]
    line = Lineage([*events, formed(3, 7, 2)])
    assert is_clean(made, line.suspicions) == clean
