"""Traces have the faults of the mix, and are equal for equal seeds."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from simulated import plain_mix

from rekindle.recovery.faults.fault import FaultKind
from rekindle.simulation import fault_mix
from rekindle.simulation.costs import load
from rekindle.simulation.trace import DAY_S, Cause, Strike, draw
from rekindle.user_file import FieldError

NODES = 1000


def drawn(what: fault_mix.Mix, days: float = 1000.0, seed: int = 1) -> list[Strike]:
    """Return the faults of 8,000 devices."""
    return draw(what, nodes=NODES, per_node=8, seconds=days * DAY_S, seed=(seed, 0))


@pytest.mark.parametrize("name", fault_mix.SHIPPED)
def test_as_many_faults_as_published(name: str) -> None:
    """The rate is correct with lemons and groups, and the shares follow the table."""
    what = fault_mix.load(name)
    found = drawn(what)
    expected = what.odds.per_1000_devices_per_day * 8 * 1000
    assert len(found) == pytest.approx(expected, abs=4 * expected**0.5)
    assert [strike.at for strike in found] == sorted(strike.at for strike in found)
    total = sum(row.weight for row in what.faults)
    counts = Counter(strike.row.name for strike in found)
    for row in what.faults:
        many = row.weight / total * len(found)
        assert counts[row.name] == pytest.approx(many, abs=4 * many**0.5 + 0.02 * many)


def test_gaps_are_exponential() -> None:
    """The standard deviation of the gaps is their mean, and 37 % are longer than the mean."""
    at = [strike.at for strike in drawn(plain_mix(2.5, FaultKind.PROCESS))]
    gaps = [after - before for before, after in itertools.pairwise(at)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.03)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


def test_lemons_fail_ten_times_as_often() -> None:
    """13 of 1,000 nodes have ten times the faults of the others; the total does not change."""
    found = drawn(plain_mix(2.5, FaultKind.PROCESS, lemon_share=0.013, second_share=0.1), days=4000)
    by_node = Counter(strike.nodes[0] for strike in found)
    lemons = {strike.nodes[0] for strike in found if strike.of_lemon}
    assert len(lemons) == 13
    second = [strike.second[1] for strike in found if strike.second]
    assert {strike.nodes[0] for strike in second if strike.of_lemon} == lemons
    theirs = sum(by_node[node] for node in lemons) / 13
    others = sum(many for node, many in by_node.items() if node not in lemons) / (NODES - 13)
    assert theirs / others == pytest.approx(10, rel=0.05)
    assert len(found) == pytest.approx(80_000, rel=0.02)


def test_a_group_is_the_nodes_of_one_switch() -> None:
    """One in 100 faults affects all 32 nodes of a switch; the last switch has fewer nodes."""
    found = drawn(plain_mix(2.5, FaultKind.PROCESS, group_share=0.01), days=4000)
    groups = [strike for strike in found if len(strike.nodes) > 1]
    assert len(groups) / len(found) == pytest.approx(0.01, rel=0.2)
    assert {len(strike.nodes) for strike in groups} == {32, 8}
    assert {strike.row.kind for strike in groups} == {FaultKind.NODE_LOST}
    assert all(strike.nodes[0] % 32 == 0 for strike in groups)


def test_causes_are_drawn_as_the_rows_say() -> None:
    """A share of the faults needs another node, and a share needs another script."""
    what = fault_mix.load("llama3")
    found = [strike for strike in drawn(what) if strike.row.name == "network switch or cable"]
    broken = sum(strike.cause is Cause.PLACE for strike in found) / len(found)
    assert broken == pytest.approx(0.36, abs=0.08)
    bugs = [strike for strike in drawn(what) if strike.row.name == "software bug"]
    assert {strike.cause for strike in bugs} == {Cause.NOTHING, Cause.SCRIPT}


def test_a_seed_draws_the_same_faults_again() -> None:
    """The same seed and run give the same trace, and another seed gives another trace."""
    what = fault_mix.load("byterobust")
    assert drawn(what, days=10) == drawn(what, days=10)
    assert drawn(what, days=10) != drawn(what, days=10, seed=2)


def test_no_faults_may_come() -> None:
    """In a very short time, no fault occurs."""
    assert drawn(fault_mix.load("rsc2"), days=1e-6) == []


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_has_times_or_cannot_be_drawn(kind: FaultKind) -> None:
    """`data/times.toml` has the times of each kind that a mix may contain."""
    if kind not in load().kinds:
        with pytest.raises(FieldError, match="a mix cannot contain this kind"):
            fault_mix.FaultRow(name="any", weight=1.0, kind=kind)
