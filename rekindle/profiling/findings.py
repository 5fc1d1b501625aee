"""Define findings: which process is slow, which findings still hold, and their text. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Container, Iterable, Sequence

import msgspec

from rekindle.words import MOST, listed

HOLDS = 3  # consecutive steps that must show something before it is a finding
# a finding holds for this number of steps without its ranks, because records end at different times
AWAY = 20
_Key = tuple["Slow", tuple[int, ...]]


class Slow(str, enum.Enum):
    """Name the kinds of findings."""

    RANK = "slow-rank"
    NODE = "slow-node"
    LINK = "slow-link"
    LOADING = "slow-data-loading"
    SAVING = "slow-checkpoint-storage"
    UNEVEN = "uneven-work"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a cause of lost time.

    `factor` compares with the time before, or, for uneven work, with the peers. `since` is the
    first step; for uneven work it is 0 if that step was before the records. `found` is the step
    that reported the finding. `cost` is its share of the steps' time. `group` is the group with
    slow collectives, for a link.
    """

    kind: Slow
    ranks: tuple[int, ...]
    factor: float
    since: int
    found: int
    cost: float = 0.0
    group: str = ""

    @property
    def may_be_sick(self) -> bool:
        """Return whether a node check is useful; no other kind leads to a replacement."""
        return self.kind in (Slow.RANK, Slow.NODE, Slow.LINK)


class Book:
    """Keep the findings that hold, from step to step."""

    def __init__(self) -> None:
        self._open: dict[_Key, Finding] = {}
        self._shown: dict[_Key, int] = {}  # number of steps that have shown it
        self._away: dict[_Key, int] = {}  # consecutive steps without all of its ranks

    @property
    def findings(self) -> list[Finding]:
        """Return the findings that hold now."""
        return list(self._open.values())

    def note(
        self, found: Iterable[Finding], there: Container[int], saved: Container[int]
    ) -> list[Finding]:
        """Update the findings that hold; return the new ones.

        Saves are rare, so a finding about them holds until the next save. `there` holds the ranks
        with a record of the step. `saved` holds the ranks that have saved in it.
        """
        now = {(each.kind, each.ranks): each for each in found}
        self._shown = {key: self._shown.get(key, 0) + 1 for key in now}
        new = []
        for key, each in now.items():
            if key in self._open:
                before = self._open[key]
                now[key] = msgspec.structs.replace(each, since=before.since, found=before.found)
            elif each.kind is Slow.SAVING or self._shown[key] >= HOLDS:
                new.append(each)
        self._away = {
            key: self._away.get(key, 0) + 1
            for key, each in self._open.items()
            if not all(rank in there for rank in each.ranks)
        }
        # The report of a node needs some steps; until then each of its ranks is slow separately.
        of_nodes = {
            rank
            for key, each in now.items()
            if each.kind is Slow.NODE and key not in self._open and each not in new
            for rank in each.ranks
        }
        kept = {
            key: each
            for key, each in self._open.items()
            if key in now
            or (each.kind is Slow.SAVING and each.ranks[0] not in saved)
            or (each.kind is Slow.RANK and each.ranks[0] in of_nodes)
            or 0 < self._away.get(key, 0) <= AWAY
        }
        self._open = {key: now.get(key, each) for key, each in kept.items()}
        self._open |= {(each.kind, each.ranks): each for each in new}
        return new

    def keep(self, *kinds: Slow) -> None:
        """Keep only findings of these kinds."""
        self._open = {key: each for key, each in self._open.items() if each.kind in kinds}

    def forget(self, ranks: Collection[int]) -> None:
        """Remove findings about any of these ranks."""
        self._open = {k: e for k, e in self._open.items() if not set(ranks) & set(e.ranks)}


def nodes_of(found: Finding, per_node: int) -> tuple[int, ...]:
    """Return the nodes of a finding; the ranks of a node have consecutive numbers."""
    return tuple(sorted({rank // per_node for rank in found.ranks}))


def who(found: Finding) -> str:
    """Return the ranks of a finding as text."""
    return listed("rank", found.ranks)


def forward_in_words(found: Finding, nodes: Sequence[int]) -> str:
    """Return the text about ranks with a longer forward pass, if the records do not show more."""
    since = f"since step {found.since}, seen in step {found.found}"
    longer = f"the forward pass takes {found.factor:.3g} times as long as before, {since}"
    subject = f"{who(found)} ({listed('node', nodes)})"
    return f"{subject}: {longer}; in plain DDP this part does not wait for other ranks"


def in_words(found: Finding, nodes: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Return the text: the slow process, the place, the first step, and the cost."""
    on = f" on {', '.join(hosts)}" if any(hosts) and len(hosts) <= MOST else ""
    subject = f"{who(found)} ({listed('node', nodes)}{on})"
    since = f"since step {found.since}, seen in step {found.found}"
    cost = f"; it costs {found.cost:.0%} of each step" if found.cost else ""
    times = f"{found.factor:.3g} times"
    match found.kind:
        case Slow.UNEVEN:
            since = f"since step {found.since}" if found.since else "since records began"
            return f"{subject}: {times} the work of its peers {since}; the node is not faulty"
        case Slow.LINK:
            slow = f"collectives of {found.group} take {times} as long"
            return f"{subject}: {slow}, although no rank is late for them, {since}{cost}"
        case Slow.LOADING:
            return f"{subject}: waits {times} as long for its data, {since}{cost}"
        case Slow.SAVING:
            return f"{subject}: saves take {times} as long, {since}{cost}"
        case _:
            return f"{subject}: computes {times} as long as before, {since}{cost}"
