"""Hold the measurements of nodes alone, in pairs and in blocks, and their errors. Pure."""

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

# The pairs of each round, by the size of the block; the numbers are places in the block.
_MEETINGS: dict[int, tuple[tuple[Edge, ...], ...]] = {
    2: (((0, 1),), (), ()),
    3: (((0, 1),), ((1, 2),), ((0, 2),)),
    4: (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))),
}

# An agent reports this about a checker that the kernel killed for memory.
KILLED = "killed because the host is out of memory"

_NO_MEMORY = re.compile(
    r"\bout of memory\b|OutOfMemoryError\b|\bMemoryError\b"
    r"|C(?:UBLAS|UDNN)_STATUS_ALLOC_FAILED|Failed to CUDA [a-z]{0,8}alloc"
    r"|\bEL0004\b|memory isn't enough|Memory resources are exhausted"
    r"|alloc(?:ate)?(?: [a-z]{1,9}){0,2} memory failed"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|\[Errno 12\]|Cannot allocate memory|bad_alloc"
    r"|shared memory segment.{0,200}No space left on device",
    re.IGNORECASE,
)
_HELD = re.compile(r"CUDA-capable device\(s\) is/are busy or unavailable", re.IGNORECASE)

# A node above this factor, relative to healthy nodes, is slow. Causes of slowness that justify a
# replacement start at 1.3. Healthy accelerators of one type differ by a few percent.
FACTOR = 1.15


def blocks(nodes: Sequence[int]) -> list[list[int]]:
    """Divide nodes into blocks of four, and the rest into threes or a pair; omit a single node."""
    left, found = list(nodes), []
    while left:
        # Five make three and two, six make three and three, because a single pair proves least.
        size = 3 if len(left) in (5, 6) else min(4, len(left))
        found.append(left[:size])
        left = left[size:]
    return [block for block in found if len(block) > 1]


def within(nodes: Sequence[int]) -> list[list[Edge]]:
    """Return three rounds of pairs in which every two nodes of a block meet."""
    rounds: list[list[Edge]] = [[], [], []]
    for block in blocks(nodes):
        for found, pairs in zip(rounds, _MEETINGS[len(block)], strict=True):
            found += [(block[one], block[other]) for one, other in pairs]
    return rounds


def across(nodes: Sequence[int]) -> list[Edge]:
    """Return one round of pairs of different blocks: each block meets the next, in a ring.

    The first and the third node of a block meet the second and the fourth of the next. Therefore
    each node is in at most one pair, and the ring crosses every division between blocks.
    """
    ring = blocks(nodes)
    if len(ring) < 2:
        return []
    pairs = zip(ring, (*ring[1:], ring[0]), strict=True)
    return [
        (min(edge), max(edge))
        for block, following in pairs
        # The smaller of two blocks limits the number of pairs.
        for edge in zip(block[0::2], following[1::2], strict=False)
    ]


def lacks_memory(error: str) -> bool:
    """Return whether the measurement failed because the device or the host lacks memory."""
    return bool(_NO_MEMORY.search(error))


def is_held(error: str) -> bool:
    """Return whether another process holds the device, and does not share it.

    Without training on the node that is a fault. During a check of a running job, its ranks may
    hold the device.
    """
    return bool(_HELD.search(error))


class Measurement(str, enum.Enum):
    """Name the measured parts of a node, each with its own verdict."""

    COMPUTE = "compute"  # a product of matrices on each device
    MEMORY = "memory"  # copies in each device's memory
    LOCAL_LINK = "local-link"  # a collective of the node's own devices
    LINK = "link"  # a collective with another node


class NodeCheckLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold the limits for slow nodes: factors relative to healthy nodes.

    `compute_factor` applies to compute and memory. `link_factor` applies to both kinds of links.
    `timeout_s` is the time that a node may take for one task, alone or in a pair, before it has
    failed.
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
            description="Seconds that a node may take for one task of the check; after that the "
            "node has failed.",
        ),
    ] = 120.0

    def __post_init__(self) -> None:
        """Check the limits; a factor that fails every node is invalid. Raises ValueError."""
        check_limits(self, "node check")

    def of(self, part: Measurement) -> float:
        """Return the factor of a part."""
        of_links = part in (Measurement.LOCAL_LINK, Measurement.LINK)
        return self.link_factor if of_links else self.compute_factor


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of a node alone. `error` is why it has no measurements.

    `seconds` is the time of the slowest device for a fixed amount of work, by part. `device` is the
    number of the failed device on the node; -1: no particular one. `note` is a remark that does not
    indicate a fault of the node.
    """

    error: str = ""
    note: str = ""
    device: int = -1
    seconds: dict[Measurement, float] = {}


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of two nodes.

    `seconds` is the time of the collectives. `error` is why they failed.
    """

    nodes: tuple[int, int]
    seconds: float = 0.0
    error: str = ""


class Evidence:
    """Hold all measurements of some nodes.

    `beside_ranks` means that ranks held the devices during the measurements. `pairs` holds pairs in
    a block, and pairs of a suspect and a reference node. `pairs_of` holds them by node. `across`
    holds pairs of different blocks, each once, before any reference node is used. They are
    separate, because a link between blocks does not prove a fault of a node. But a node that has
    worked well across blocks is not at fault.
    """

    def __init__(self, nodes: Iterable[int], *, beside_ranks: bool = False) -> None:
        self.nodes = tuple(sorted(nodes))
        self._beside_ranks = beside_ranks
        self.alone: dict[int, list[Alone]] = {node: [] for node in self.nodes}
        self.pairs: list[Pair] = []
        self.across: dict[Edge, Pair] = {}
        self._across_of: dict[int, Pair] = {}
        self._edges_across: dict[Edge, None] | None = None
        self.pairs_of: dict[int, list[Pair]] = {node: [] for node in self.nodes}
        self._usual: dict[Measurement, float] = {}  # time of healthy nodes, computed on demand

    def add(self, result: Alone | Pair, node: int = -1) -> None:
        """Add the result of a node alone, or of a pair."""
        self._usual.clear()
        if not isinstance(result, Pair):
            self.alone[node].append(result)
            self._edges_across = None
        # A pair that has met across blocks may meet again when one of them is a reference node.
        elif result.nodes in self.edges_across and result.nodes not in self.across:
            self.across[result.nodes] = result
            self._across_of |= dict.fromkeys(result.nodes, result)
        else:
            self.pairs.append(result)
            for each in result.nodes:
                self.pairs_of[each].append(result)

    @property
    def working(self) -> list[int]:
        """Return the nodes that can be measured with others."""
        return [node for node in self.nodes if not self.is_broken(node)]

    @property
    def edges_across(self) -> Collection[Edge]:
        """Return the planned pairs of different blocks.

        They are final after all nodes have worked alone.
        """
        if self._edges_across is None:
            self._edges_across = dict.fromkeys(across(self.working))
        return self._edges_across

    def is_measured(self, result: Alone | Pair) -> bool:
        """Return whether the result has measurements, or an error that concerns the hardware."""
        held = self._beside_ranks and is_held(result.error)
        return not result.error or not (held or lacks_memory(result.error))

    # ---- nodes alone

    def tries(self, node: int) -> int:
        """Return how often the node has worked alone and has measurements."""
        return sum(not each.error for each in self.alone[node])

    def failures(self, node: int) -> int:
        """Return how often the node has failed alone, except for errors that measure nothing."""
        return sum(bool(each.error) and self.is_measured(each) for each in self.alone[node])

    def unmeasured(self, node: int) -> int:
        """Return how often the node was not measured: low memory, or a rank held the device."""
        return sum(not self.is_measured(each) for each in self.alone[node])

    def is_broken(self, node: int) -> bool:
        """Return whether the newest attempt of the node alone failed."""
        return bool(self.alone[node]) and bool(self.alone[node][-1].error)

    def seconds(self, part: Measurement, node: int) -> float | None:
        """Return the best time of a part of the node; None: unknown.

        A temporary disturbance slows a healthy node only once, but a slow node is always slow.
        """
        if part is Measurement.LINK:
            own = [pair.seconds for pair in self.pairs_of[node] if not pair.error]
        else:
            own = [each.seconds[part] for each in self.alone[node] if part in each.seconds]
        return min(own, default=None)

    def over(self, part: Measurement, node: int) -> float:
        """Return the time of a node relative to healthy nodes; 1: not known to be longer."""
        own, usual = self.seconds(part, node), self.usual(part)
        if own is None or not usual:
            return 1.0
        beyond = self._across_of.get(node) if part is Measurement.LINK else None
        return min(own, beyond.seconds if beyond and not beyond.error else own) / usual

    def usual(self, part: Measurement) -> float:
        """Return the time of healthy nodes; 0: unknown."""
        if part not in self._usual:
            known = [self.seconds(part, node) for node in self.nodes]
            self._usual[part] = reference([each for each in known if each is not None])
        return self._usual[part]

    # ---- nodes in pairs

    def worked_with(self, node: int) -> set[int]:
        """Return the nodes with which a collective of the node succeeded."""
        return {_other(pair, node) for pair in self.pairs_of[node] if not pair.error}

    def reaches_across(self, node: int) -> bool:
        """Return whether the collective with a node of another block succeeded."""
        return node in self._across_of and not self._across_of[node].error

    def failed_with(self, node: int) -> set[int]:
        """Return the nodes with which a collective failed, and none succeeded."""
        tried = [pair for pair in self.pairs_of[node] if pair.error and self.is_measured(pair)]
        return {_other(pair, node) for pair in tried} - self.worked_with(node)


def reference(values: list[float]) -> float:
    """Return the time of healthy nodes: the median of the faster half; 0: no values.

    Up to half of the nodes may be slow. The median of all could then belong to a slow node.
    """
    if not values:
        return 0.0
    return statistics.median(sorted(values)[: (len(values) + 1) // 2])


def _other(pair: Pair, node: int) -> int:
    first, second = pair.nodes
    return second if node == first else first
