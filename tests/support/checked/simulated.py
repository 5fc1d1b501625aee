"""Simulated nodes with given measurements, and random sets of faulty nodes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec

from rekindle.recovery.node_check.evidence import (
    Alone,
    Evidence,
    Measurement,
    NodeCheckLimits,
    Pair,
)
from rekindle.recovery.node_check.rounds import next_round
from rekindle.recovery.node_check.verdicts import NodeVerdict, verdicts

SIZES = (4, 5, 6, 8, 16)
LIMITS = NodeCheckLimits()
NOISE = 0.02  # relative noise of each measurement


class Sick(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a node.

    `dies`: its checker process ends in each round.
    `cut`: the share of its collectives that fail.
    `slow`: the factor by which each measurement takes longer.
    """

    dies: bool = False
    cut: float = 0.0
    slow: dict[Measurement, float] = {}


class Cluster:
    """A cluster of nodes with given faults, whose measurements have random noise."""

    def __init__(self, nodes: Iterable[int], sick: dict[int, Sick], seed: int) -> None:
        self.evidence = Evidence(nodes)
        self.rounds = 0
        self._sick = sick
        self._chance = random.Random(seed)

    def check(self, limits: NodeCheckLimits = LIMITS) -> dict[int, NodeVerdict]:
        while (planned := next_round(self.evidence, limits)) is not None:
            self.rounds += 1
            assert self.rounds < 20, "it never ends"
            assert bool(planned.alone) != bool(planned.pairs)
            busy = [*planned.alone, *(node for edge in planned.pairs for node in edge)]
            assert len(busy) == len(set(busy)), "a node is asked for two things at once"
            for node in planned.alone:
                self.evidence.add(self._alone(node), node)
            for edge in planned.pairs:
                self.evidence.add(self._pair(edge))
        return {each.node: each for each in verdicts(self.evidence, limits)}

    def _of(self, node: int) -> Sick:
        return self._sick.get(node, Sick())

    def _noise(self) -> float:
        return self._chance.lognormvariate(0.0, NOISE)

    def _alone(self, node: int) -> Alone:
        sick = self._of(node)
        if sick.dies:
            return Alone(error="its process was killed")
        parts = (Measurement.COMPUTE, Measurement.MEMORY, Measurement.LOCAL_LINK)
        return Alone(seconds={p: sick.slow.get(p, 1.0) * self._noise() for p in parts})

    def _pair(self, edge: tuple[int, int]) -> Pair:
        both = [self._of(node) for node in edge]
        if any(self._chance.random() < sick.cut for sick in both):
            return Pair(nodes=edge, error="connection reset")
        slowest = max(sick.slow.get(Measurement.LINK, 1.0) for sick in both)
        return Pair(nodes=edge, seconds=slowest * self._noise())


def sets(count: int, share: float) -> Iterable[tuple[int, set[int], random.Random]]:
    """Yield (number of nodes, faulty nodes, random generator).

    `share`: the maximum share of faulty nodes.
    """
    chance = random.Random(20261123)
    for index in range(count):
        size = SIZES[index % len(SIZES)]
        most = int(size * share)
        yield size, set(chance.sample(range(size), chance.randint(1, most))), chance


def any_fault(chance: random.Random) -> Sick:
    """Return a random fault that makes a node faulty."""
    return chance.choice([Sick(dies=True), Sick(cut=1.0)])
