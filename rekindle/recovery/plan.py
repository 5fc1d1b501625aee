"""The plan of a regroup: the step every rank goes on from, and where its state comes from. Pure."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Collection, Iterable, Mapping

import msgspec


class Source(str, enum.Enum):
    """Where a rank's training state comes from, nearest first."""

    SELF = "self"  # its own memory is right
    PEER = "peer"  # sent by another rank
    SNAPSHOT = "snapshot"  # its agent's memory
    NEIGHBOUR = "neighbour"  # another agent's memory
    CHECKPOINT = "checkpoint"  # the store
    FRESH = "fresh"  # as the script built it: nothing was trained yet


_DISTANCE = list(Source)


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank can offer when it has arrived at a regroup.

    shard: which piece of the training state it holds. Ranks of the same shard are a replica group:
        they hold the same. In data-parallel training there is one shard.
    finished: steps its live state has finished; None: it has none (just started).
    torn: it was inside an optimizer update that did not end; its state is of no step.
    snapshots: steps of the snapshots that its node's agent has of it.
    copies: snapshots of it that agents of other nodes have: (node, step).
    checkpoints: steps of the checkpoints that its node can read; they hold all shards.
    left: steps of those that the run has left behind (see rekindle.recovery.lineage).
    """

    node: int
    shard: int = 0
    finished: int | None = None
    torn: bool = False
    snapshots: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    checkpoints: tuple[int, ...] = ()
    left: tuple[int, ...] = ()


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does: take its state from `source`.

    peer: the rank that sends it, if that is PEER; node: whose agent has it, if it is NEIGHBOUR.
    sends_to: ranks that receive this rank's state once it has its own.
    writes: of its replica group, it is the one that writes checkpoints.
    keeper: the node whose agent keeps copies of its snapshots; -1: nobody's.
    """

    source: Source
    peer: int = -1
    node: int = -1
    sends_to: tuple[int, ...] = ()
    writes: bool = False
    keeper: int = -1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The step all ranks go on from (steps finished) and what each rank does.

    shards: pieces that the state is in; a checkpoint has all of them.
    """

    step: int
    ranks: tuple[RankPlan, ...]
    shards: int = 1


def make_plan(holdings: Mapping[int, Holding]) -> Plan:
    """Plan for all ranks: one step, and for each replica group where its state of that step is.

    holdings: one entry per rank 0..world_size-1.
    A step counts only if every replica group has it. The newest of which all groups have a live
    copy wins: whatever is newer than it was left by ranks that died a step ahead, and doing that
    step again costs less than loading it. Without such a step the newest wins that every group has
    anywhere, each group from the nearest place. A torn rank is never a source. A checkpoint that
    the run has left behind counts for all ranks or for none, and where nothing else is as new.
    """
    groups: dict[int, dict[int, Holding]] = {}
    for rank in sorted(holdings):
        groups.setdefault(holdings[rank].shard, {})[rank] = holdings[rank]
    offers = [_nearest(group.values()) for group in groups.values()]
    live = set.intersection(*({s for s in each if each[s] is Source.SELF} for each in offers))
    steps = live or set.intersection(*(set(each) for each in offers))
    step = max(steps, default=0)
    left = set.intersection(
        *({s for h in each.values() for s in h.left} for each in groups.values())
    )
    if not live and max(left, default=0) > step:
        alone = {
            r: Holding(node=h.node, shard=h.shard, checkpoints=h.left) for r, h in holdings.items()
        }
        return make_plan(alone)
    plans: dict[int, RankPlan] = {}
    for group, offer in zip(groups.values(), offers, strict=True):
        plans |= _share(step, offer[step] if steps else Source.FRESH, group)
    for rank, keeper in _keepers(groups.values()).items():
        plans[rank] = msgspec.structs.replace(plans[rank], keeper=keeper)
    return Plan(step=step, ranks=tuple(plans[r] for r in sorted(plans)), shards=len(groups))


def _steps(holding: Holding) -> dict[Source, Collection[int]]:
    """The steps that a rank can bring itself to, by source."""
    live = holding.finished is not None and not holding.torn
    return {
        Source.SELF: (holding.finished,) if holding.finished is not None and live else (),
        Source.SNAPSHOT: holding.snapshots,
        Source.NEIGHBOUR: [step for _, step in holding.copies],
        Source.CHECKPOINT: holding.checkpoints,
    }


def _nearest(group: Iterable[Holding]) -> dict[int, Source]:
    """The steps that a replica group can reach, each with the nearest source of it."""
    nearest: dict[int, Source] = {}
    for holding in group:
        for source, steps in _steps(holding).items():
            for step in steps:
                nearest[step] = min(source, nearest.get(step, source), key=_DISTANCE.index)
    return nearest


def _share(step: int, source: Source, group: Mapping[int, Holding]) -> dict[int, RankPlan]:
    """Give every rank of a replica group that has not the source the nearest that has."""
    writer = min(group)
    if source is Source.FRESH:
        return {rank: RankPlan(source=source, writes=rank == writer) for rank in group}
    holders = [rank for rank in group if step in _steps(group[rank])[source]]
    senders = _senders(holders, group)
    peers = {to: rank for rank, receivers in senders.items() for to in receivers}
    plans = {}
    for rank, holding in group.items():
        if rank in peers:
            plans[rank] = RankPlan(source=Source.PEER, peer=peers[rank], writes=rank == writer)
            continue
        at = next((node for node, copy in holding.copies if copy == step), -1)
        plans[rank] = RankPlan(
            source=source,
            node=at if source is Source.NEIGHBOUR else -1,
            sends_to=tuple(senders[rank]),
            writes=rank == writer,
        )
    return plans


def _keepers(groups: Collection[Mapping[int, Holding]]) -> dict[int, int]:
    """Who keeps copies of whose snapshots, so that no shard is lost with a single node.

    A replica group that spans nodes needs none. Of any other one rank is copied, for the others
    hold the same: to the next node of the ring that they are, in their order.
    """
    homes = {min(group): {holding.node for holding in group.values()} for group in groups}
    nodes = sorted(set().union(*homes.values()))
    after = dict(zip(nodes, [*nodes[1:], *nodes[:1]], strict=True))
    alone = {rank: min(home) for rank, home in homes.items() if len(home) == 1}
    return {rank: after[node] for rank, node in alone.items()} if len(nodes) > 1 else {}


def _senders(holders: list[int], group: Mapping[int, Holding]) -> dict[int, list[int]]:
    """Who sends to whom: each rank that is no holder gets the nearest one that sends least."""
    senders: dict[int, list[int]] = {rank: [] for rank in holders}
    idlest = [(0, rank) for rank in holders]  # a heap: how many it sends to, holder
    on_node: dict[int, list[int]] = {}
    for rank in holders:
        on_node.setdefault(group[rank].node, []).append(rank)
    for rank, holding in group.items():
        if rank in senders:
            continue
        while idlest[0][0] < len(senders[idlest[0][1]]):  # it was chosen as the nearest meanwhile
            first = idlest[0][1]
            heapq.heapreplace(idlest, (len(senders[first]), first))
        least, first = idlest[0]
        near = (h for h in on_node.get(holding.node, ()) if len(senders[h]) == least)
        senders[next(near, first)].append(rank)
    return senders
