"""Checks across blocks of nodes: a fault of the network is reported without a faulty node."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from rekindle.recovery.node_check.evidence import (
    Alone,
    Evidence,
    Measurement,
    NodeCheckLimits,
    Pair,
    across,
    blocks,
    within,
)
from rekindle.recovery.node_check.rounds import next_round
from rekindle.recovery.node_check.verdicts import SICK, Health, NodeVerdict, verdicts

LIMITS = NodeCheckLimits()
CUT = 0.0  # instead of a time in seconds
OK, UNKNOWN = Health.HEALTHY, Health.UNKNOWN


def checked(
    size: int, seconds: Callable[[int, int], float], slow: dict[int, float] | None = None
) -> list[NodeVerdict]:
    """Return the verdicts for nodes whose collectives take these times.

    slow: times of the product on these nodes.
    """
    evidence = Evidence(range(size))
    for _ in range(20):
        planned = next_round(evidence, LIMITS)
        if planned is None:
            return verdicts(evidence, LIMITS)
        for node in planned.alone:
            evidence.add(Alone(seconds={Measurement.COMPUTE: (slow or {}).get(node, 1.0)}), node)
        for one, other in planned.pairs:
            took = seconds(one, other)
            error = "" if took else "time-out"
            evidence.add(Pair(nodes=(one, other), seconds=took, error=error))
    raise AssertionError("it never ends")


def halves(size: int, between: float) -> Callable[[int, int], float]:
    """Return the times of a network that is cut or slow between its halves."""
    return lambda a, b: 1.0 if (a < size // 2) == (b < size // 2) else between


@pytest.mark.parametrize("size", range(2, 40))
def test_the_ring_crosses_each_line_between_blocks(size: int) -> None:
    """Each block meets the next one in a ring, and no node is in two pairs."""
    edges = across(range(size))
    busy = [node for edge in edges for node in edge]
    assert len(busy) == len(set(busy))
    of = {node: number for number, block in enumerate(blocks(range(size))) for node in block}
    joined = {frozenset((of[a], of[b])) for a, b in edges}
    count = len(blocks(range(size)))
    assert joined == {frozenset((n, (n + 1) % count)) for n in range(count) if count > 1}
    assert not set(edges) & set(itertools.chain(*within(range(size))))


@pytest.mark.parametrize("size", [8, 16, 24])
def test_halves_that_do_not_reach_each_other(size: int) -> None:
    """If two halves are cut off from each other, no node is faulty.

    Nodes of blocks between which all collectives failed are not healthy either.
    """
    found = checked(size, halves(size, CUT))
    assert {each.health for each in found} <= {OK, UNKNOWN}
    middle = size // 2
    at_the_line = {0, 1, 2, 3, middle - 1, middle, size - 1}
    assert all(found[node].health is UNKNOWN for node in at_the_line)
    assert found[middle].part is Measurement.LINK
    output = found[middle - 1].reason
    assert f"node {middle - 1} do not reach node {middle} and" in output


def test_all_eight_are_told_that_they_are_two_times_four() -> None:
    """All nodes have the same reason, which names both blocks."""
    fields = {each.reason for each in checked(8, halves(8, CUT))}
    assert fields == {
        "node 0 and node 1 and node 2 and node 3 do not reach node 4 and node 5 and node 6 and "
        "node 7, because all 4 collectives between these two blocks failed: time-out"
    }


@pytest.mark.parametrize("size", [5, 6, 7, 8, 9, 16])
@pytest.mark.parametrize("between", [1.3, 3.0])
def test_a_slow_network_between_blocks_is_said(size: int, between: float) -> None:
    """A slow network between blocks is in the reasons of the measured nodes, which are healthy."""
    of = {node: number for number, block in enumerate(blocks(range(size))) for node in block}
    found = checked(size, lambda a, b: 1.0 if of[a] == of[b] else between)
    assert {each.health for each in found} == {OK}
    fields = {each.node for each in found if f"takes {between:.2f} times as long" in each.reason}
    assert fields == {node for edge in across(range(size)) for node in edge}


def test_one_path_that_fails_across_is_of_two_nodes() -> None:
    """If one collective between two blocks fails, only its two nodes are unknown."""
    found = checked(8, lambda a, b: CUT if (a, b) == (0, 5) else 1.0)
    assert {each.node for each in found if each.health is UNKNOWN} == {0, 5}
    assert "its collective with node 5 in another block failed" in found[0].reason


def test_what_a_sick_node_explains_is_said_of_nobody_else() -> None:
    """A node that is cut off and a node with a slow device explain their partners' failures.

    The partners in other blocks are healthy.
    """
    slow = {6: 1.5}

    def seconds(a: int, b: int) -> float:
        return CUT if 0 in (a, b) else max(slow.get(a, 1.0), slow.get(b, 1.0))

    found = checked(8, seconds, slow)
    healths = {each.node: each.health for each in found}
    assert (healths.pop(0), healths.pop(6)) == (Health.FAULTY, Health.STRAGGLER)
    assert set(healths.values()) == {OK}
    assert not any(found[node].reason for node in healths)


def test_a_cut_and_a_sick_node_are_both_told() -> None:
    """A node that is cut off from its block is faulty, even if the network is also cut."""
    apart = halves(8, CUT)
    found = checked(8, lambda a, b: CUT if 2 in (a, b) else apart(a, b))
    assert found[2].health is Health.FAULTY
    assert {each.health for each in found if each.node != 2} == {UNKNOWN}


@pytest.mark.parametrize("between", [CUT, 1.5])
def test_who_works_well_across_is_not_at_fault(between: float) -> None:
    """A node that works with other blocks is not faulty, even if its own block does not reach it.

    It may be in another rack than its block.
    """
    partner = next(b for a, b in across(range(8)) if a == 2)
    rack = {2, partner, *(node for node in range(4, 8))}

    def seconds(a: int, b: int) -> float:
        return 1.0 if (a in rack) == (b in rack) else between

    found = checked(8, seconds)
    assert not [each.node for each in found if each.health in SICK]
    if between == CUT:
        assert found[2].health is UNKNOWN


def test_want_of_memory_across_says_nothing() -> None:
    """A pair without memory was not measured, so its nodes are not cut off."""
    evidence = Evidence(range(8))
    while (planned := next_round(evidence, LIMITS)) is not None:
        for node in planned.alone:
            evidence.add(Alone(seconds={Measurement.COMPUTE: 1.0}), node)
        for edge in planned.pairs:
            error = "CUDA out of memory" if edge in evidence.edges_across else ""
            evidence.add(Pair(nodes=edge, seconds=1.0, error=error))
    assert {(each.health, each.reason) for each in verdicts(evidence, LIMITS)} == {(OK, "")}
