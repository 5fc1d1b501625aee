"""Random sets of faulty nodes: the check names exactly these or none, never a healthy node."""

from __future__ import annotations

import random

import pytest
from checked.simulated import LIMITS, SIZES, Cluster, Sick, any_fault, sets

from rekindle.recovery.node_check.evidence import (
    Alone,
    Evidence,
    Measurement,
    NodeCheckLimits,
    Pair,
    reference,
    within,
)
from rekindle.recovery.node_check.rounds import next_round
from rekindle.recovery.node_check.verdicts import Health, verdicts


def test_faulty_nodes_are_named_exactly() -> None:
    for size, bad, chance in sets(500, 0.5):
        found = Cluster(range(size), {n: any_fault(chance) for n in bad}, len(bad)).check()
        named = {node for node, each in found.items() if each.health is Health.FAULTY}
        assert named == bad, (size, bad, found)
        healthy = {node for node, each in found.items() if each.health is Health.HEALTHY}
        assert healthy == set(range(size)) - bad


@pytest.mark.parametrize("part", list(Measurement))
@pytest.mark.parametrize("factor", [1.3, 1.5, 3.0])
def test_slow_nodes_are_named_exactly(part: Measurement, factor: float) -> None:
    for size, bad, chance in sets(100, 0.5):
        sick = {node: Sick(slow={part: factor}) for node in bad}
        found = Cluster(range(size), sick, chance.randrange(9**9)).check()
        named = {node: each.part for node, each in found.items() if each.health is Health.STRAGGLER}
        assert named == dict.fromkeys(bad, part), (size, bad)


@pytest.mark.parametrize("count", [2, 4])
def test_slow_alike_of_eight(count: int) -> None:
    bad = set(range(count))
    found = Cluster(range(8), {n: Sick(slow={Measurement.COMPUTE: 1.3}) for n in bad}, 1).check()
    assert {node for node, each in found.items() if each.health is Health.STRAGGLER} == bad


def test_nobody_healthy_is_blamed_by_nodes_that_fail_now_and_then() -> None:
    accused = 0
    for size, bad, chance in sets(500, 0.5):
        sick = {node: Sick(cut=chance.choice([0.3, 0.5, 0.8])) for node in bad}
        found = Cluster(range(size), sick, chance.randrange(9**9)).check()
        wrong = {Health.FAULTY, Health.STRAGGLER}
        accused += sum(each.health in wrong for node, each in found.items() if node not in bad)
    assert accused == 0


def test_more_than_half_sick_blames_nobody_healthy() -> None:
    chance = random.Random(7)
    for _ in range(500):
        size = chance.choice(SIZES)
        bad = set(chance.sample(range(size), chance.randint(size // 2 + 1, size)))
        found = Cluster(range(size), {n: Sick(cut=1.0) for n in bad}, 3).check()
        healthy = set(range(size)) - bad
        assert all(found[node].health is not Health.FAULTY for node in healthy)
        if len(healthy) < 2:
            assert {each.health for each in found.values()} == {Health.UNKNOWN}


def test_all_healthy_takes_five_rounds_however_many() -> None:
    for size in (2, 3, 4, 5, 16, 257):
        cluster = Cluster(range(size), {}, 5)
        assert {each.health for each in cluster.check().values()} == {Health.HEALTHY}
        assert cluster.rounds <= 5 + 1  # because of noise, a node may be measured twice


def test_two_nodes_cannot_tell_which_of_them_is_cut_off() -> None:
    found = Cluster(range(2), {0: Sick(cut=1.0)}, 1).check()
    assert {each.health for each in found.values()} == {Health.UNKNOWN}
    assert "cannot find out which one" in found[0].reason


def test_two_nodes_tell_which_of_them_is_slow_or_dies() -> None:
    found = Cluster(range(2), {0: Sick(slow={Measurement.COMPUTE: 1.5})}, 1).check()
    assert (found[0].health, found[1].health) == (Health.STRAGGLER, Health.HEALTHY)
    found = Cluster(range(2), {1: Sick(dies=True)}, 1).check()
    assert (found[0].health, found[1].health) == (Health.HEALTHY, Health.FAULTY)


def test_three_nodes_tell_which_of_them_is_cut_off() -> None:
    found = Cluster(range(3), {1: Sick(cut=1.0)}, 1).check()
    assert [found[n].health for n in range(3)] == [Health.HEALTHY, Health.FAULTY, Health.HEALTHY]


def test_one_node_is_judged_by_what_it_does_alone() -> None:
    assert Cluster([0], {}, 1).check()[0].health is Health.HEALTHY
    assert Cluster([0], {0: Sick(dies=True)}, 1).check()[0].health is Health.FAULTY


def test_a_node_that_fails_alone_once_is_not_blamed() -> None:
    evidence = Evidence([0, 1])
    evidence.add(Alone(error="killed"), 0)
    evidence.add(Alone(seconds={Measurement.COMPUTE: 1.0}), 1)
    again = next_round(evidence, LIMITS)
    assert again is not None
    assert again.alone == (0,)
    evidence.add(Alone(seconds={Measurement.COMPUTE: 1.0}), 0)
    evidence.add(Pair(nodes=(0, 1), seconds=1.0))
    assert next_round(evidence, LIMITS) is None
    assert {each.health for each in verdicts(evidence, LIMITS)} == {Health.HEALTHY}


def test_a_path_that_fails_between_two_healthy_nodes_blames_neither() -> None:
    evidence = Evidence(range(4))
    for node in range(4):
        evidence.add(Alone(seconds={Measurement.COMPUTE: 1.0}), node)
    for planned in within(range(4)):
        for edge in planned:
            error = "time-out" if edge == (0, 3) else ""
            evidence.add(Pair(nodes=edge, seconds=1.0, error=error))
    assert next_round(evidence, LIMITS) is None
    found = verdicts(evidence, LIMITS)
    assert [each.health for each in found] == [
        Health.UNKNOWN,
        Health.HEALTHY,
        Health.HEALTHY,
        Health.UNKNOWN,
    ]
    assert "node 3" in found[0].reason


@pytest.mark.parametrize("size", range(2, 40))
def test_each_node_meets_its_block_and_no_two_at_once(size: int) -> None:
    met: list[tuple[int, int]] = []
    for planned in within(range(size)):
        busy = [node for edge in planned for node in edge]
        assert len(busy) == len(set(busy))
        met += planned
    assert len(met) == len(set(met))
    assert {node for edge in met for node in edge} == set(range(size))


def test_the_reference_is_that_of_the_faster_half() -> None:
    assert reference([]) == 0.0
    assert reference([2.0]) == 2.0
    assert reference([1.0, 9.0]) == 1.0
    assert reference([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]) == 1.0


@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan"), float("inf")])
def test_a_factor_that_blames_everybody_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"above 1|finite number"):
        NodeCheckLimits(link_factor=factor)
