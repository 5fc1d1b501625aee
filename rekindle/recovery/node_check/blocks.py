"""Which nodes meet whom, whatever they are: in blocks of four, and across those. Pure."""

from __future__ import annotations

from collections.abc import Sequence

Edge = tuple[int, int]


def blocks(nodes: Sequence[int]) -> list[list[int]]:
    """Cut nodes into blocks of four, the rest into threes or a pair; one alone is left out."""
    left, found = list(nodes), []
    while left:
        # Five are three and two, six are three and three: a pair by itself tells the least.
        size = 3 if len(left) in (5, 6) else min(4, len(left))
        found.append(left[:size])
        left = left[size:]
    return [block for block in found if len(block) > 1]


def within(nodes: Sequence[int]) -> list[list[Edge]]:
    """Return three rounds of pairs in which every two nodes of a block meet."""
    rounds: list[list[Edge]] = [[], [], []]
    for block in blocks(nodes):
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


def across(nodes: Sequence[int]) -> list[Edge]:
    """Return one round of pairs of different blocks: each block meets the next, in a ring.

    The first and the third of a block meet the second and the fourth of the next. So no node is in
    two pairs, and wherever a line is drawn between blocks the ring crosses it.
    """
    ring = blocks(nodes)
    if len(ring) < 2:
        return []
    pairs = zip(ring, (*ring[1:], ring[0]), strict=True)
    return [
        (min(edge), max(edge))
        for block, following in pairs
        # The smaller of two blocks has fewer nodes for that.
        for edge in zip(block[0::2], following[1::2], strict=False)
    ]
