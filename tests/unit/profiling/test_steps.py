"""The parts of each step, from the records of a rank."""

from __future__ import annotations

import pytest

from rekindle.profiling.markers import COMMUNICATION, DEFAULT, Range
from rekindle.profiling.steps import Steps, StepTimes

S = 1_000_000_000


def made(name: str, start: float, end: float, domain: str = DEFAULT) -> Range:
    return Range(name, domain, int(start * S), int(end * S))


def reduced(start: float, end: float) -> Range:
    return made("all_reduce", start, end, COMMUNICATION)


def only(*ranges: Range) -> StepTimes:
    (times,) = Steps().read(ranges)
    return times


def test_a_step_in_its_parts() -> None:
    times = only(
        made("dataloader", 0, 1), made("forward", 1, 3), reduced(6, 9), made("step 7", 0, 10)
    )
    assert (times.step, times.seconds) == (7, 10.0)
    assert (times.loading, times.forward, times.waiting) == (1.0, 2.0, 3.0)
    assert (times.own, times.compute) == (7.0, 6.0)


def test_without_collectives_all_is_own_work() -> None:
    times = only(made("step 0", 0, 10))
    assert (times.own, times.waiting) == (10.0, 0.0)


@pytest.mark.parametrize(
    ("collectives", "waiting"),
    [
        ([(2, 3), (5, 9)], 5.0),  # the rank waits for each
        ([(2, 5), (4, 9)], 5.0),  # both overlap while the rank works
        ([(2, 9), (4, 5)], 5.0),  # the first may end after the second
        ([(2, 3), (3, 4)], 2.0),  # one after the other
        ([(8, 14)], 2.0),  # it ends with the step, despite a late callback
        ([], 0.0),
    ],
)
def test_a_rank_waits_only_while_it_does_nothing_else(
    collectives: list[tuple[float, float]], waiting: float
) -> None:
    ranges = [reduced(*each) for each in collectives]
    for order in (ranges, ranges[::-1]):
        assert only(*order, made("step 1", 0, 10)).waiting == pytest.approx(waiting)


def test_what_is_of_no_step_is_not_counted() -> None:
    """Records of an evaluation or an interrupted step do not count; saves are between steps."""
    first, second = Steps().read(
        [
            made("forward", 0, 4),
            made("step 0", 5, 6),
            made("save_checkpoint", 6, 8),
            made("forward", 8, 9),
            made("step 1", 8, 10),
        ]
    )
    assert (first.forward, first.saving) == (0.0, 0.0)
    assert (second.forward, second.saving) == (1.0, 2.0)


def test_saves_inside_a_step_are_no_work() -> None:
    """Saves within a step, as in Megatron's loop, are not work.

    Waits within a save are not subtracted twice.
    """
    save, late = made("save_checkpoint", 5, 8), made("save_checkpoint", 7, 11)
    times = only(reduced(2, 3), reduced(6, 7), save, made("step 1", 0, 10), late)
    assert (times.saving, times.waiting, times.own) == (3.0, 2.0, 6.0)
    assert only(save, late, made("step 1", 0, 10)).own == 5.0
