"""The closed formulas: published values, and the optimality of the best interval."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.policy.interval import best_interval
from rekindle.simulation import estimate

LLAMA_16K = 0.4737 * 16.384 / 86_400  # faults per second of 16,384 devices


@pytest.mark.parametrize(
    ("stall", "downtime", "expected"), [(30.0, 540.0, 0.8844), (120.0, 1380.0, 0.7598)]
)
def test_goodput_is_as_published(stall: float, downtime: float, expected: float) -> None:
    """goodput() agrees with two values that another simulation confirmed before."""
    interval = estimate.young(LLAMA_16K, stall)
    found = estimate.goodput(rate=LLAMA_16K, interval=interval, stall=stall, downtime=downtime)
    assert found == pytest.approx(expected, abs=0.0003)


def test_without_faults_only_the_stall_costs_anything() -> None:
    """Without faults, the job loses only the stalls, and the best interval is infinite."""
    assert estimate.goodput(rate=0.0, interval=90.0, stall=10.0, downtime=5.0) == 0.9
    assert best_interval(0.0, 10.0) == math.inf


def test_a_job_that_reaches_no_checkpoint_makes_no_progress() -> None:
    """If the interval is far longer than the mean time between faults, goodput is 0."""
    assert estimate.goodput(rate=1.0, interval=1e6, stall=1.0, downtime=1.0) == 0.0


@given(rate=st.floats(1e-9, 1e-2), stall=st.floats(1e-2, 1e3), factor=st.floats(0.3, 3.0))
def test_no_other_interval_is_better(rate: float, stall: float, factor: float) -> None:
    """Any other interval gives less goodput, or the same within rounding."""
    best = best_interval(rate, stall)
    at = {"rate": rate, "stall": stall, "downtime": 0.0}
    other = estimate.goodput(interval=best * factor, **at)
    assert other <= estimate.goodput(interval=best, **at) * (1 + 1e-9)


@given(rate=st.floats(1e-9, 1e-6), stall=st.floats(1.0, 60.0))
def test_for_rare_faults_all_three_intervals_agree(rate: float, stall: float) -> None:
    """For rare faults, the intervals of Young and Daly agree with the exact interval."""
    best = best_interval(rate, stall)
    assert estimate.daly(rate, stall) == pytest.approx(best, rel=0.01)
    assert estimate.young(rate, stall) == pytest.approx(best, rel=0.01)


def test_where_first_order_fails_daly_takes_the_mean_gap() -> None:
    """If the stall exceeds twice the mean time between faults, daly() returns that mean time."""
    assert estimate.daly(1.0, 3.0) == 1.0
    assert estimate.daly(1.0, 1.0) == pytest.approx(math.sqrt(2) - 1)


@pytest.mark.parametrize(
    ("freedom", "expected"), [(4, 2.7764), (9, 2.2622), (19, 2.0930), (99, 1.9842)]
)
def test_student_is_as_in_the_tables(freedom: int, expected: float) -> None:
    """student() agrees with printed values of Student's t."""
    assert estimate.student(freedom) == pytest.approx(expected, rel=0.003)
