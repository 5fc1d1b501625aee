"""The interval that Rekindle chooses from the cost of checkpoints and the rate of faults."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.policy.interval import (
    AUTO,
    FIRST_STEPS,
    LEAST_S,
    MOST_S,
    Chosen,
    Interval,
    best_interval,
)

DAY_S = 86_400.0


def automatic(devices: int = 1024, **before: float) -> Interval:
    fields = {"known": 0, "faults": 0, "seconds": 0.0} | before
    return Interval(AUTO, devices=devices, **fields)


def test_one_that_is_asked_for_stays() -> None:
    """An interval that the user sets stays, whatever the job measures."""
    for asked in (0, 7):
        interval = Interval(asked, devices=8, known=99, faults=3, seconds=10.0)
        interval.at(0.0, 0)
        interval.at(10.0, 10)
        assert interval.written(stall_s=5.0, write_s=100.0) is None
        assert interval.left_out() is None
        assert interval.steps == asked


def test_it_follows_from_what_is_measured() -> None:
    """The interval follows from the formula and the step time, and is announced if it changes."""
    interval = automatic()
    assert interval.steps == FIRST_STEPS
    assert interval.written(stall_s=0.5, write_s=3.0) is None  # the step time is unknown
    interval.at(100.0, 50)
    interval.at(120.0, 60)
    chosen = interval.written(stall_s=0.5, write_s=3.0)
    assert chosen is not None
    rate = 1 / (DAY_S / (2.7 * 1.024) + 20.0)
    assert interval.rate == pytest.approx(rate)
    assert chosen.seconds == pytest.approx(best_interval(rate, 0.5), abs=1.0)
    assert chosen.seconds == pytest.approx(math.sqrt(2 * 0.5 / rate), rel=0.01)
    assert chosen.steps == interval.steps == round(chosen.seconds / 2.0)
    assert chosen.reason == (
        "a checkpoint stops training for 500 ms and takes 3.0 s to write; "
        "Rekindle expects a fault every 8.7 h"
    )
    interval.at(140.0, 70)
    assert interval.written(stall_s=0.51, write_s=3.1) is None


def test_faults_make_it_shorter() -> None:
    """Faults of this attempt and of earlier ones shorten the interval."""

    def chosen(interval: Interval, faults: int) -> Chosen:
        interval.at(0.0, 0)
        for _ in range(faults):
            interval.fault()
        interval.at(DAY_S, 1000)
        interval.at(2 * DAY_S, 87_400)
        found = interval.written(stall_s=1.0, write_s=1.0)
        assert found is not None
        return found

    none = chosen(automatic(8, seconds=50 * DAY_S), 0).seconds
    before = chosen(automatic(8, faults=400, seconds=50 * DAY_S), 0).seconds
    now = chosen(automatic(8, seconds=50 * DAY_S), 400).seconds
    assert none == pytest.approx(MOST_S, abs=1.0)
    assert now == pytest.approx(before, abs=1.0)  # whole steps
    assert now < none / 2


def test_it_stays_within_bounds() -> None:
    """The interval has a lower and an upper limit, but the store is idle at least half the time."""
    for devices, stall_s, write_s, wanted in (
        (10**6, 0.0, 0.1, LEAST_S),
        (1, 500.0, 1.0, MOST_S),
        (10**6, 0.001, 40.0, 80.0),
        (1, 1.0, 5000.0, 10_000.0),
    ):
        interval = automatic(devices)
        interval.at(0.0, 0)
        interval.at(1.0, 1)
        chosen = interval.written(stall_s=stall_s, write_s=write_s)
        seconds = chosen.seconds if chosen else interval.steps
        assert seconds == pytest.approx(wanted, abs=0.5)


def test_a_busy_store() -> None:
    """Before a measurement, each checkpoint that is left out doubles the interval.

    After a measurement, the interval has a limit.
    """
    interval = automatic()
    found = [interval.left_out() for _ in range(3)]
    assert [chosen.steps for chosen in found if chosen] == [20, 40, 80]
    interval.at(0.0, 0)
    interval.at(100.0, 10)
    for _ in range(100):
        interval.left_out()
    assert interval.steps <= 360  # one hour


def test_it_goes_on_where_an_earlier_attempt_was() -> None:
    """A later attempt starts with the interval that the earlier one chose last."""
    assert automatic(known=321).steps == 321


positive = st.floats(1e-6, 1e6)


@given(st.integers(1, 10**6), positive, positive, positive, st.integers(0, 10**4))
def test_any_measurement(
    devices: int, stall_s: float, write_s: float, step_s: float, faults: int
) -> None:
    """For any measurement, an interval exists and stays within its limits."""
    interval = automatic(devices, faults=faults)
    interval.at(0.0, 0)
    interval.at(step_s, 1)
    chosen = interval.written(stall_s=stall_s, write_s=write_s)
    assert interval.steps >= 1
    if chosen is not None:
        assert chosen.steps == interval.steps
        least = max(LEAST_S, 2 * write_s)
        assert interval.steps >= max(1.0, least / step_s) - 0.5
        assert chosen.seconds <= max(MOST_S, 2 * write_s) + step_s
