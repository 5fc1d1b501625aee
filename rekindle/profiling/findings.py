"""Findings: what is slow, which findings still hold, and their text. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Container, Iterable, Sequence

import msgspec

from rekindle.words import MOST, listed

HOLDS = 3  # steps that something must be seen in, one after the other
AWAY = 20  # steps without one of its ranks in which it still holds: records of all end not alike
_Key = tuple["Slow", tuple[int, ...]]


class Slow(str, enum.Enum):
    """What is slow."""

    RANK = "slow-rank"
    NODE = "slow-node"
    LINK = "slow-link"
    LOADING = "slow-data-loading"
    SAVING = "slow-checkpoint-storage"
    UNEVEN = "uneven-work"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that costs steps their time.

    factor: how many times as long as before, or, of uneven work, as its peers. since: the step that
    it began with, of uneven work 0 if that was before the records; found: the one that it was told
    in. cost: share of the steps' time that it costs. group: whose collectives are slow, of a link.
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
        """Whether a node check is worth its time; because of nothing else anybody is replaced."""
        return self.kind in (Slow.RANK, Slow.NODE, Slow.LINK)


class Book:
    """What holds, from step to step."""

    def __init__(self) -> None:
        self._open: dict[_Key, Finding] = {}
        self._seen: dict[_Key, int] = {}  # for so many steps
        self._away: dict[_Key, int] = {}  # steps in a row in which not all of its ranks were there

    @property
    def findings(self) -> list[Finding]:
        """What holds now."""
        return list(self._open.values())

    def note(
        self, found: Iterable[Finding], there: Container[int], saved: Container[int]
    ) -> list[Finding]:
        """Keep what holds; return what is new. Saves come seldom, and hold until the next one.

        there: ranks that the step is known of. saved: those that have saved in it.
        """
        now = {(each.kind, each.ranks): each for each in found}
        self._seen = {key: self._seen.get(key, 0) + 1 for key in now}
        new = []
        for key, each in now.items():
            if key in self._open:
                before = self._open[key]
                now[key] = msgspec.structs.replace(each, since=before.since, found=before.found)
            elif each.kind is Slow.SAVING or self._seen[key] >= HOLDS:
                new.append(each)
        self._away = {
            key: self._away.get(key, 0) + 1
            for key, each in self._open.items()
            if not all(rank in there for rank in each.ranks)
        }
        # A node is told after some steps; until then its ranks are slow, each by itself.
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
        """Forget all that is of another kind."""
        self._open = {key: each for key, each in self._open.items() if each.kind in kinds}

    def forget(self, ranks: Collection[int]) -> None:
        """Forget what is about any of these."""
        self._open = {k: e for k, e in self._open.items() if not set(ranks) & set(e.ranks)}


def nodes_of(found: Finding, per_node: int) -> tuple[int, ...]:
    """Return the nodes that the finding is about; their ranks are numbered one after the other."""
    return tuple(sorted({rank // per_node for rank in found.ranks}))


def who(found: Finding) -> str:
    """Name the ranks that a finding is about."""
    return listed("rank", found.ranks)


def forward_in_words(found: Finding, nodes: Sequence[int]) -> str:
    """Say whose forward pass has become longer, where nothing else can be told."""
    since = f"since step {found.since}, seen in step {found.found}"
    longer = f"the forward pass takes {found.factor:.3g} times as long as before, {since}"
    subject = f"{who(found)} ({listed('node', nodes)})"
    return f"{subject}: {longer}; in plain DDP it waits for nobody there"


def in_words(found: Finding, nodes: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Say what is slow, where, since when, and what that costs."""
    on = f" on {', '.join(hosts)}" if any(hosts) and len(hosts) <= MOST else ""
    subject = f"{who(found)} ({listed('node', nodes)}{on})"
    since = f"since step {found.since}, seen in step {found.found}"
    cost = f"; it costs {found.cost:.0%} of each step" if found.cost else ""
    times = f"{found.factor:.3g} times"
    match found.kind:
        case Slow.UNEVEN:
            since = f"since step {found.since}" if found.since else "since records began"
            return f"{subject}: {times} the work of its peers {since}; not sick"
        case Slow.LINK:
            slow = f"collectives of {found.group} take {times} as long"
            return f"{subject}: {slow}, though nobody comes late to them, {since}{cost}"
        case Slow.LOADING:
            return f"{subject}: waits {times} as long for its data, {since}{cost}"
        case Slow.SAVING:
            return f"{subject}: saves take {times} as long, {since}{cost}"
        case _:
            return f"{subject}: computes {times} as long as before, {since}{cost}"
