"""What nodes have measured, alone and in pairs, and how far apart that is. Pure values."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable

import msgspec

from rekindle.recovery.node_check.unmeasured import is_held, lacks_memory

# A node is slow from here on, in times of the healthy ones. Sources of slowness that are worth a
# replacement begin at 1.3; healthy accelerators of one sort differ by a few percent.
FACTOR = 1.15


class Part(str, enum.Enum):
    """What of a node is measured, each judged by itself."""

    COMPUTE = "compute"  # a product of matrices on each device
    MEMORY = "memory"  # copies in each device's memory
    LOCAL_LINK = "local-link"  # a collective of the node's own devices
    LINK = "link"  # a collective with another node


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From what on a node is slow: times of what healthy nodes take.

    compute_factor: for compute and memory. link_factor: for both sorts of links. timeout_s: how
    long a node may take for what it does alone, or with another one, before it counts as failed.
    """

    compute_factor: float = FACTOR
    link_factor: float = FACTOR
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse what would accuse everybody. Raises ValueError."""
        for name in ("compute_factor", "link_factor"):
            value = getattr(self, name)
            if not 1.0 < value < math.inf:
                raise ValueError(f"node check: {name} is {value}; give a factor above 1")
        if not 0.0 < self.timeout_s < math.inf:
            raise ValueError(f"node check: timeout_s is {self.timeout_s}; give seconds above 0")

    def of(self, part: Part) -> float:
        """Return the factor of a part."""
        of_links = part in (Part.LOCAL_LINK, Part.LINK)
        return self.link_factor if of_links else self.compute_factor


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """What a node did by itself. error: why it could not; it has no figures then.

    seconds: what a fixed amount of work took its slowest device, by part. device: the one that
    failed, by its number on the node; -1: none in particular. note: what is to be said of it, and
    accuses nobody.
    """

    error: str = ""
    note: str = ""
    device: int = -1
    seconds: dict[Part, float] = {}


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What two nodes did together. seconds: what collectives took; error: why they failed."""

    nodes: tuple[int, int]
    seconds: float = 0.0
    error: str = ""


class Evidence:
    """All that was measured of some nodes. beside_ranks: while ranks held their devices."""

    def __init__(self, nodes: Iterable[int], *, beside_ranks: bool = False) -> None:
        self.nodes = tuple(sorted(nodes))
        self._beside_ranks = beside_ranks
        self.alone: dict[int, list[Alone]] = {node: [] for node in self.nodes}
        self.pairs: list[Pair] = []
        self._pairs_of: dict[int, list[Pair]] = {node: [] for node in self.nodes}
        self._usual: dict[Part, float] = {}  # what healthy nodes take, as far as was asked

    def add(self, result: Alone | Pair, node: int = -1) -> None:
        """Take what a node has measured alone, or a pair."""
        self._usual.clear()
        if isinstance(result, Pair):
            self.pairs.append(result)
            for each in result.nodes:
                self._pairs_of[each].append(result)
        else:
            self.alone[node].append(result)

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

    def seconds(self, part: Part, node: int) -> float | None:
        """Return what a part of the node took, at best; None: nothing is known of it.

        What slows a healthy node down for a moment does so once; a slow one is slow each time.
        """
        if part is Part.LINK:
            own = [pair.seconds for pair in self.pairs_of(node) if not pair.error]
        else:
            own = [each.seconds[part] for each in self.alone[node] if part in each.seconds]
        return min(own, default=None)

    def over(self, part: Part, node: int) -> float:
        """Return how many times as long as healthy nodes it takes; 1: not known to be longer."""
        if part not in self._usual:
            known = [self.seconds(part, other) for other in self.nodes]
            self._usual[part] = reference([each for each in known if each is not None])
        usual = self._usual[part]
        own = self.seconds(part, node)
        return 1.0 if own is None or not usual else own / usual

    # ---- in pairs

    def pairs_of(self, node: int) -> list[Pair]:
        """Return what it did with others."""
        return self._pairs_of[node]

    def worked_with(self, node: int) -> set[int]:
        """Return the nodes with which a collective came out well."""
        return {_other(pair, node) for pair in self.pairs_of(node) if not pair.error}

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
