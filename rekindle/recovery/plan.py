"""The plan of a regroup: the step every rank goes on from, and where its state comes from. Pure."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Mapping

import msgspec


class Source(str, enum.Enum):
    """Where a rank's training state comes from, nearest first."""

    SELF = "self"  # its own memory is right
    PEER = "peer"  # sent by another rank
    SNAPSHOT = "snapshot"  # its agent's memory
    CHECKPOINT = "checkpoint"  # the store
    FRESH = "fresh"  # as the script built it: nothing was trained yet


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank can offer when it has arrived at a regroup.

    finished: steps its live state has finished; None: it has none (just started).
    torn: it was inside an optimizer update that did not end; its state is of no step.
    snapshots: steps of the snapshots that its node's agent has of it.
    checkpoints: steps of the checkpoints that its node can read.
    """

    node: int
    finished: int | None = None
    torn: bool = False
    snapshots: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does: take its state from `source`; `peer` is set when that is PEER.

    sends_to: ranks that receive this rank's state once it has its own.
    """

    source: Source
    peer: int = -1
    sends_to: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The step all ranks go on from (steps finished) and what each rank does."""

    step: int
    ranks: tuple[RankPlan, ...]


def make_plan(holdings: Mapping[int, Holding]) -> Plan:
    """Plan for one replica group: all ranks hold the same state.

    holdings: one entry per rank 0..world_size-1.
    The newest live copy wins: whatever is newer than it was left by a rank that died a step ahead,
    and doing that step again costs less than loading it. Without a live copy the newest snapshot or
    checkpoint wins, of equals the snapshot. A torn rank is never a source.
    """
    live = {r: h.finished for r, h in holdings.items() if h.finished is not None and not h.torn}
    if live:
        step = max(live.values())
        return _share(step, Source.SELF, [r for r in sorted(live) if live[r] == step], holdings)
    kept = {
        (step, source)
        for holding in holdings.values()
        for source, steps in _kept(holding).items()
        for step in steps
    }
    if not kept:
        return Plan(step=0, ranks=tuple(RankPlan(source=Source.FRESH) for _ in holdings))
    step, source = max(kept, key=lambda offer: (offer[0], offer[1] is Source.SNAPSHOT))
    holders = [r for r in sorted(holdings) if step in _kept(holdings[r])[source]]
    return _share(step, source, holders, holdings)


def _kept(holding: Holding) -> dict[Source, tuple[int, ...]]:
    return {Source.SNAPSHOT: holding.snapshots, Source.CHECKPOINT: holding.checkpoints}


def _share(step: int, source: Source, holders: list[int], holdings: Mapping[int, Holding]) -> Plan:
    """Give every rank outside `holders` the nearest holder that sends least."""
    senders: dict[int, list[int]] = {rank: [] for rank in holders}
    peers: dict[int, int] = {}
    idlest = [(0, rank) for rank in holders]  # a heap: how many it sends to, holder
    on_node: dict[int, list[int]] = {}
    for rank in holders:
        on_node.setdefault(holdings[rank].node, []).append(rank)
    for rank in sorted(holdings):
        if rank in senders:
            continue
        while idlest[0][0] < len(senders[idlest[0][1]]):  # it was chosen as the nearest meanwhile
            first = idlest[0][1]
            heapq.heapreplace(idlest, (len(senders[first]), first))
        least, first = idlest[0]
        near = (h for h in on_node.get(holdings[rank].node, ()) if len(senders[h]) == least)
        peer = next(near, first)
        senders[peer].append(rank)
        peers[rank] = peer
    ranks = tuple(
        RankPlan(source=source, sends_to=tuple(senders[rank]))
        if rank in senders
        else RankPlan(source=Source.PEER, peer=peers[rank])
        for rank in sorted(holdings)
    )
    return Plan(step=step, ranks=ranks)
