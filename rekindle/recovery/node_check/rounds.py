"""What nodes measure next, until what is known suffices. Pure.

1. Each node alone; what fails, is slow, or was not measured there does it once more.
2. Three rounds of pairs. In blocks of four every two of the block meet (in blocks of three, too).
   A block in which no pair works well has at most one healthy node; so, if not more than half of
   all are sick, some pair of healthy ones has met, and knows of each other that they are.
3. Whoever has not worked well with anybody meets two of those.

This takes the same few rounds however many nodes there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rekindle.recovery.node_check.evidence import Evidence, Limits, Part

Edge = tuple[int, int]

TRIES = 2  # alone, of a kind, before a node is taken for faulty or slow
WITNESSES = 2  # healthy nodes that a suspect has to fail with


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured next: some nodes alone, or some in pairs, none in two of them."""

    alone: tuple[int, ...] = ()
    pairs: tuple[Edge, ...] = ()


def next_round(evidence: Evidence, limits: Limits) -> Round | None:
    """Return what to measure next; None: all that can be told is told."""
    alone = [node for node in evidence.nodes if _works_again(evidence, limits, node)]
    if alone:
        return Round(alone=tuple(alone))
    met = {pair.nodes for pair in evidence.pairs}
    rounds = first_rounds([node for node in evidence.nodes if not evidence.is_broken(node)])
    for planned in rounds:
        missing = [edge for edge in planned if edge not in met]
        if missing:
            return Round(pairs=tuple(missing))
    first = {edge for planned in rounds for edge in planned}
    pairs = _with_witnesses(evidence, limits, met - first)
    return Round(pairs=tuple(pairs)) if pairs else None


def first_rounds(nodes: Sequence[int]) -> list[list[Edge]]:
    """Return three rounds of pairs in which every two nodes of a block meet."""
    rounds: list[list[Edge]] = [[], [], []]
    for block in _blocks(nodes):
        a, b, *rest = block
        if not rest:
            rounds[0].append((a, b))
        elif len(rest) == 1:
            for found, edge in zip(rounds, ((a, b), (b, rest[0]), (a, rest[0])), strict=True):
                found.append(edge)
        else:
            c, d = rest
            for found, edges in zip(
                rounds, (((a, b), (c, d)), ((a, c), (b, d)), ((a, d), (b, c))), strict=True
            ):
                found.extend(edges)
    return rounds


def _blocks(nodes: Sequence[int]) -> list[list[int]]:
    """Cut nodes into blocks of four, the rest into threes or a pair; one alone is left out."""
    left, blocks = list(nodes), []
    while left:
        # Five are three and two, six are three and three: a pair by itself tells the least.
        size = 3 if len(left) in (5, 6) else min(4, len(left))
        blocks.append(left[:size])
        left = left[size:]
    return [block for block in blocks if len(block) > 1]


def _works_again(evidence: Evidence, limits: Limits, node: int) -> bool:
    if not evidence.alone[node]:
        return True
    if evidence.is_broken(node):
        return evidence.failures(node) < TRIES and evidence.unmeasured(node) < TRIES
    slow = any(
        evidence.over(part, node) > limits.of(part) for part in Part if part is not Part.LINK
    )
    return slow and evidence.tries(node) < TRIES


def is_witness(evidence: Evidence, limits: Limits, node: int) -> bool:
    """Whether it has worked well with somebody: both are healthy then."""
    worked = bool(evidence.worked_with(node)) and not evidence.is_broken(node)
    return worked and evidence.over(Part.LINK, node) <= limits.link_factor


def _with_witnesses(evidence: Evidence, limits: Limits, later: set[Edge]) -> list[Edge]:
    """Return pairs of a suspect and a healthy node that have not met; none in two of them.

    later: the pairs that were of this sort so far. Whom a suspect has met in its block counts only
    where there is nobody else: two nodes that fail now and then may have worked with each other.
    """
    witnesses = [node for node in evidence.nodes if is_witness(evidence, limits, node)]
    free = sorted(witnesses, key=lambda node: (len(evidence.failed_with(node)), node))
    pairs: list[Edge] = []
    for node in evidence.nodes:
        if evidence.is_broken(node) or node in witnesses:
            continue
        met = {other for pair in evidence.pairs_of(node) for other in pair.nodes}
        fresh = [each for each in free if each not in met]
        if fresh and sum(node in edge for edge in later) < WITNESSES:
            free.remove(fresh[0])
            pairs.append((min(node, fresh[0]), max(node, fresh[0])))
    return pairs
