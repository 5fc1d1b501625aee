"""What is between blocks: who does not reach whom, or is slow to. It accuses nobody. Pure.

A network that is cut, or slow, between two blocks leaves all of their nodes well among themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from rekindle.recovery.node_check.blocks import blocks
from rekindle.recovery.node_check.evidence import Evidence, Limits, Pair, Part

Sayings = dict[int, str]  # by node
Sides = tuple[tuple[int, ...], tuple[int, ...]]  # two blocks


def cut_off(evidence: Evidence, sound: set[int], called: Mapping[int, str]) -> Sayings:
    """Return why nodes are unknown that do not reach others of another block.

    sound: those that work well with somebody, and are not at fault; what others fail in is theirs.
    """
    found: dict[int, list[str]] = {}
    for sides, pairs in _between(evidence, sound).items():
        failed = [pair for pair in pairs if pair.error]
        if len(failed) == len(pairs) > 1:
            one, other = (" and ".join(called[node] for node in side) for side in sides)
            said = (
                f"{one} do not reach {other}: all {len(failed)} collectives between these two "
                f"blocks failed: {failed[0].error}"
            )
            for node in sound & {node for side in sides for node in side}:
                found.setdefault(node, []).append(said)
            continue
        for pair in failed:
            for node, partner in (pair.nodes, pair.nodes[::-1]):
                said = (
                    f"its collective with {called[partner]}, which is of another block, failed, "
                    f"and those with others did not: {pair.error}"
                )
                found.setdefault(node, []).append(said)
    return {node: "; ".join(said) for node, said in found.items()}


def slow_links(
    evidence: Evidence, limits: Limits, sound: set[int], called: Mapping[int, str]
) -> Sayings:
    """Return what is to be said of nodes whose collective across takes too long.

    sound: those that are not slow themselves; what others are slow in is theirs.
    """
    found: Sayings = {}
    usual, limit = evidence.usual(Part.LINK), limits.of(Part.LINK)
    for pairs in _between(evidence, sound).values():
        for pair in pairs:
            if pair.error or not usual or pair.seconds / usual <= limit:
                continue
            for node, partner in (pair.nodes, pair.nodes[::-1]):
                found[node] = (
                    f"its collective with {called[partner]}, which is of another block, takes "
                    f"{pair.seconds / usual:.2f} times as long as those within blocks "
                    f"({limit:g} is the limit); that says nothing against either"
                )
    return found


def _between(evidence: Evidence, sound: set[int]) -> dict[Sides, list[Pair]]:
    """Return what was measured between sound nodes, by the two blocks that they are of."""
    of = {node: tuple(block) for block in blocks(evidence.working) for node in block}
    found: dict[Sides, list[Pair]] = {}
    for edge, pair in evidence.across.items():
        if evidence.is_measured(pair) and sound.issuperset(edge):
            first, second = sorted(of[node] for node in edge)
            found.setdefault((first, second), []).append(pair)
    return found
