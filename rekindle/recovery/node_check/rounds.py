"""What nodes measure next, until what is known suffices. Pure.

1. Each node alone; what fails, is slow, or was not measured there does it once more.
2. Three rounds of pairs. In blocks of four every two of the block meet (in blocks of three, too).
   A block in which no pair works well has at most one healthy node; so, if not more than half of
   all are sick, some pair of healthy ones has met, and knows of each other that they are.
3. One round of pairs of different blocks: what is between blocks would be seen by nobody else.
4. Whoever has not worked well with anybody of its block meets two who have.

This takes the same few rounds however many nodes there are.
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

TRIES = 2  # alone, of a kind, before a node is taken for faulty or slow
REFERENCE_NODES = 2  # healthy nodes that a suspect has to fail with


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured next: some nodes alone, or some in pairs, none in two of them."""

    alone: tuple[int, ...] = ()
    pairs: tuple[Edge, ...] = ()


def next_round(evidence: Evidence, limits: NodeCheckLimits) -> Round | None:
    """Return what to measure next; None: all that can be told is told."""
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
    """Whether it has worked well with somebody: both are healthy then."""
    worked = bool(evidence.worked_with(node)) and not evidence.is_broken(node)
    return worked and evidence.over(Measurement.LINK, node) <= limits.link_factor


def _with_references(evidence: Evidence, limits: NodeCheckLimits, later: set[Edge]) -> list[Edge]:
    """Return pairs of a suspect and a healthy node that have not met; none in two of them.

    later: the pairs that were of this sort so far. Whom a suspect has met in its block counts only
    where there is nobody else: two nodes that fail now and then may have worked with each other.
    """
    references = [node for node in evidence.nodes if is_reference(evidence, limits, node)]
    free = sorted(references, key=lambda node: (len(evidence.failed_with(node)), node))
    pairs: list[Edge] = []
    for node in evidence.nodes:
        if evidence.is_broken(node) or node in references:
            continue
        met = {other for pair in evidence.pairs_of(node) for other in pair.nodes}
        fresh = [each for each in free if each not in met]
        if fresh and sum(node in edge for edge in later) < REFERENCE_NODES:
            free.remove(fresh[0])
            pairs.append((min(node, fresh[0]), max(node, fresh[0])))
    return pairs
