"""Choose the next measurements of nodes until the evidence is sufficient. Pure.

1. Each node works alone. A node that fails, is slow, or was not measured works alone once again.
2. Three rounds of pairs follow, in which every two nodes of a block of three or four meet. A block
without a working pair has at most one healthy node. Therefore, if at most half of all nodes are
unhealthy, some pair of healthy nodes has met and worked well.
3. One round of pairs of different blocks follows, because no other round tests links between
blocks.
4. A node without a working pair in its block meets two nodes that have one.

The number of rounds does not depend on the number of nodes.
"""

from __future__ import annotations

import msgspec

from rekindle.recovery.node_check.evidence import (
    Edge,
    Evidence,
    Measurement,
    NodeCheckLimits,
    within,
)

TRIES = 2  # attempts alone, of one kind, before a node counts as faulty or slow
REFERENCE_NODES = 2  # a faulty node fails with this number of healthy nodes


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the next measurements: some nodes alone, or some pairs without a common node."""

    alone: tuple[int, ...] = ()
    pairs: tuple[Edge, ...] = ()


def next_round(evidence: Evidence, limits: NodeCheckLimits) -> Round | None:
    """Return the next measurements; None: further measurements would not add evidence."""
    alone = [node for node in evidence.nodes if _works_again(evidence, limits, node)]
    if alone:
        return Round(alone=tuple(alone))
    met = {pair.nodes for pair in evidence.pairs}
    rounds = within(evidence.working)
    for planned in rounds:
        missing = [edge for edge in planned if edge not in met]
        if missing:
            return Round(pairs=tuple(missing))
    missing = [edge for edge in evidence.edges_across if edge not in evidence.across]
    if missing:
        return Round(pairs=tuple(missing))
    first = {edge for planned in rounds for edge in planned}
    pairs = _with_references(evidence, limits, met - first)
    return Round(pairs=tuple(pairs)) if pairs else None


def _works_again(evidence: Evidence, limits: NodeCheckLimits, node: int) -> bool:
    if not evidence.alone[node]:
        return True
    if evidence.is_broken(node):
        return evidence.failures(node) < TRIES and evidence.unmeasured(node) < TRIES
    slow = any(
        evidence.over(part, node) > limits.of(part)
        for part in Measurement
        if part is not Measurement.LINK
    )
    return slow and evidence.tries(node) < TRIES


def is_reference(evidence: Evidence, limits: NodeCheckLimits, node: int) -> bool:
    """Return whether the node has worked well with another node: then both are healthy."""
    worked = bool(evidence.worked_with(node)) and not evidence.is_broken(node)
    return worked and evidence.over(Measurement.LINK, node) <= limits.link_factor


def _with_references(evidence: Evidence, limits: NodeCheckLimits, later: set[Edge]) -> list[Edge]:
    """Return pairs of a suspect and a healthy node that have not met, without a common node.

    `later` holds the earlier pairs of this kind. A partner from the suspect's block counts only if
    there is no other. Two nodes that fail occasionally may have worked with each other.
    """
    references = [node for node in evidence.nodes if is_reference(evidence, limits, node)]
    free = sorted(references, key=lambda node: (len(evidence.failed_with(node)), node))
    pairs: list[Edge] = []
    for node in evidence.nodes:
        if evidence.is_broken(node) or node in references:
            continue
        met = {other for pair in evidence.pairs_of[node] for other in pair.nodes}
        fresh = [each for each in free if each not in met]
        if fresh and sum(node in edge for edge in later) < REFERENCE_NODES:
            free.remove(fresh[0])
            pairs.append((min(node, fresh[0]), max(node, fresh[0])))
    return pairs
