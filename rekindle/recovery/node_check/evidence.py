"""What nodes have measured, alone, in pairs and in blocks; errors that measure nothing. Pure."""

from __future__ import annotations

import enum
import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from rekindle.settings import check_limits

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


# What an agent says of a checker that it has seen end so.
KILLED = "killed for want of memory"

_NO_MEMORY = re.compile(
    r"\bout of memory\b|OutOfMemoryError\b|\bMemoryError\b|\bfor want of memory\b"
    r"|C(?:UBLAS|UDNN)_STATUS_ALLOC_FAILED|Failed to CUDA [a-z]{0,8}alloc"
    r"|\bEL0004\b|memory isn't enough|Memory resources are exhausted"
    r"|alloc(?:ate)?(?: [a-z]{1,9}){0,2} memory failed"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|\[Errno 12\]|Cannot allocate memory|bad_alloc"
    r"|shared memory segment.{0,200}No space left on device",
    re.IGNORECASE,
)
_HELD = re.compile(r"CUDA-capable device\(s\) is/are busy or unavailable", re.IGNORECASE)


def lacks_memory(error: str) -> bool:
    """Whether it could not be measured for want of memory, of the device or the host."""
    return bool(_NO_MEMORY.search(error))


def is_held(error: str) -> bool:
    """Whether another process holds the device, and does not share it.

    Where nobody trains that is a fault; ranks of the job that is checked may do so.
    """
    return bool(_HELD.search(error))


# A node is slow from here on, in times of the healthy ones. Sources of slowness that are worth a
# replacement begin at 1.3; healthy accelerators of one sort differ by a few percent.
FACTOR = 1.15


class Measurement(str, enum.Enum):
    """What of a node is measured, each judged by itself."""

    COMPUTE = "compute"  # a product of matrices on each device
    MEMORY = "memory"  # copies in each device's memory
    LOCAL_LINK = "local-link"  # a collective of the node's own devices
    LINK = "link"  # a collective with another node


class NodeCheckLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From what on a node is slow: times of what healthy nodes take.

    compute_factor: for compute and memory. link_factor: for both sorts of links. timeout_s: how
    long a node may take for what it does alone, or with another one, before it counts as failed.
    """

    compute_factor: Annotated[
        float,
        Meta(
            gt=1,
            le=1000,
            description="A node is slow if its devices take this many times as long as others'.",
        ),
    ] = FACTOR
    link_factor: Annotated[
        float,
        Meta(
            gt=1,
            le=1000,
            description="A node is slow if its links take this many times as long as others'.",
        ),
    ] = FACTOR
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description="Seconds that a node may take for one task of the check; after that it has "
            "failed.",
        ),
    ] = 120.0

    def __post_init__(self) -> None:
        """Refuse what would blame every node. Raises ValueError."""
        check_limits(self, "node check")

    def of(self, part: Measurement) -> float:
        """Return the factor of a part."""
        of_links = part in (Measurement.LOCAL_LINK, Measurement.LINK)
        return self.link_factor if of_links else self.compute_factor


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """What a node did by itself. error: why it could not; it has no figures then.

    seconds: what a fixed amount of work took its slowest device, by part. device: the one that
    failed, by its number on the node; -1: none in particular. note: what is to be said of it, and
    blames no node.
    """

    error: str = ""
    note: str = ""
    device: int = -1
    seconds: dict[Measurement, float] = {}


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What two nodes did together. seconds: what collectives took; error: why they failed."""

    nodes: tuple[int, int]
    seconds: float = 0.0
    error: str = ""


class Evidence:
    """All that was measured of some nodes. beside_ranks: while ranks held their devices.

    pairs: of a block, or of a suspect and a reference node. across: of different blocks, each once,
    before any reference node is used. They are kept apart: no node is blamed for a link between
    blocks, but a node that has worked well there is not at fault.
    """

    def __init__(self, nodes: Iterable[int], *, beside_ranks: bool = False) -> None:
        self.nodes = tuple(sorted(nodes))
        self._beside_ranks = beside_ranks
        self.alone: dict[int, list[Alone]] = {node: [] for node in self.nodes}
        self.pairs: list[Pair] = []
        self.across: dict[Edge, Pair] = {}
        self._across_of: dict[int, Pair] = {}
        self._edges_across: dict[Edge, None] | None = None
        self._pairs_of: dict[int, list[Pair]] = {node: [] for node in self.nodes}
        self._usual: dict[Measurement, float] = {}  # what healthy nodes take, as far as was asked

    def add(self, result: Alone | Pair, node: int = -1) -> None:
        """Take what a node has measured alone, or a pair."""
        self._usual.clear()
        if isinstance(result, Pair) and self._is_across(result):
            self.across[result.nodes] = result
            self._across_of |= dict.fromkeys(result.nodes, result)
        elif isinstance(result, Pair):
            self.pairs.append(result)
            for each in result.nodes:
                self._pairs_of[each].append(result)
        else:
            self.alone[node].append(result)
            self._edges_across = None

    def _is_across(self, pair: Pair) -> bool:
        # Who has met across may meet once more, as suspect and reference node.
        return pair.nodes in self.edges_across and pair.nodes not in self.across

    @property
    def working(self) -> list[int]:
        """Nodes that can be measured with others."""
        return [node for node in self.nodes if not self.is_broken(node)]

    @property
    def edges_across(self) -> Collection[Edge]:
        """Pairs of different blocks that are to meet; known when all have worked alone."""
        if self._edges_across is None:
            self._edges_across = dict.fromkeys(across(self.working))
        return self._edges_across

    def is_measured(self, result: Alone | Pair) -> bool:
        """Whether it has figures, or an error that says something about the hardware."""
        held = self._beside_ranks and is_held(result.error)
        return not result.error or not (held or lacks_memory(result.error))

    # ---- alone

    def tries(self, node: int) -> int:
        """How often the node has worked alone, as far as it could: it has figures then."""
        return sum(not each.error for each in self.alone[node])

    def failures(self, node: int) -> int:
        """How often it could not, and not for want of memory."""
        return sum(bool(each.error) and self.is_measured(each) for each in self.alone[node])

    def unmeasured(self, node: int) -> int:
        """How often there was no room to measure it."""
        return sum(not self.is_measured(each) for each in self.alone[node])

    def is_broken(self, node: int) -> bool:
        """Whether it did not even work alone, when it was to last."""
        return bool(self.alone[node]) and bool(self.alone[node][-1].error)

    def seconds(self, part: Measurement, node: int) -> float | None:
        """Return what a part of the node took, at best; None: nothing is known of it.

        What slows a healthy node down for a moment does so once; a slow one is slow each time.
        """
        if part is Measurement.LINK:
            own = [pair.seconds for pair in self.pairs_of(node) if not pair.error]
        else:
            own = [each.seconds[part] for each in self.alone[node] if part in each.seconds]
        return min(own, default=None)

    def over(self, part: Measurement, node: int) -> float:
        """Return how many times as long as healthy nodes it takes; 1: not known to be longer."""
        own, usual = self.seconds(part, node), self.usual(part)
        if own is None or not usual:
            return 1.0
        beyond = self._across_of.get(node) if part is Measurement.LINK else None
        return min(own, beyond.seconds if beyond and not beyond.error else own) / usual

    def usual(self, part: Measurement) -> float:
        """Return what it takes healthy nodes; 0: nothing is known."""
        if part not in self._usual:
            known = [self.seconds(part, node) for node in self.nodes]
            self._usual[part] = reference([each for each in known if each is not None])
        return self._usual[part]

    # ---- in pairs

    def pairs_of(self, node: int) -> list[Pair]:
        """Return what it did with others."""
        return self._pairs_of[node]

    def worked_with(self, node: int) -> set[int]:
        """Return the nodes with which a collective came out well."""
        return {_other(pair, node) for pair in self.pairs_of(node) if not pair.error}

    def reaches_across(self, node: int) -> bool:
        """Whether its collective with a node of another block came out well."""
        return node in self._across_of and not self._across_of[node].error

    def failed_with(self, node: int) -> set[int]:
        """Return the nodes with which one did not, and none did since or before."""
        tried = [pair for pair in self.pairs_of(node) if pair.error and self.is_measured(pair)]
        return {_other(pair, node) for pair in tried} - self.worked_with(node)


def reference(values: list[float]) -> float:
    """Return what healthy nodes take: the median of the faster half; 0: of no values.

    Up to half of the nodes may be slow: the median of all is one of theirs then.
    """
    if not values:
        return 0.0
    return statistics.median(sorted(values)[: (len(values) + 1) // 2])


def _other(pair: Pair, node: int) -> int:
    first, second = pair.nodes
    return second if node == first else first
