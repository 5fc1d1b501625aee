"""The plan of a regroup: the step every rank goes on from, and where its state comes from. Pure."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Collection, Iterable, Mapping

import msgspec

# A state by its name: steps finished, and the generation that did the last of them. A step that is
# done again in a later generation, perhaps not bit by bit the same, makes another state.
Made = tuple[int, int]


class StateSource(str, enum.Enum):
    """Where a rank's training state comes from, nearest first."""

    SELF = "self"  # its own memory is right
    PEER = "peer"  # sent by another rank
    SNAPSHOT = "snapshot"  # its agent's memory
    REPLICA = "replica"  # another agent's memory
    CHECKPOINT = "checkpoint"  # the store
    FRESH = "fresh"  # as the script built it: nothing was trained yet


_DISTANCE = list(StateSource)


class AvailableState(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank can offer when it has arrived at a regroup.

    shard: which piece of the training state it holds. Ranks of the same shard are a replica group:
        they hold the same. In data-parallel training there is one shard.
    live: the state it has; None: none (just started, or interrupted while that was changed).
    snapshots: those that its node's agent has of it.
    copies: snapshots of it that agents of other nodes have: (node, state).
    checkpoints: those that its node can read; they hold all shards.
    """

    node: int
    shard: int = 0
    live: Made | None = None
    snapshots: tuple[Made, ...] = ()
    copies: tuple[tuple[int, Made], ...] = ()
    checkpoints: tuple[Made, ...] = ()


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does: take its state from `source`.

    peer: the rank that sends it, if that is PEER; node: whose agent has it, if it is REPLICA.
    sends_to: ranks that receive this rank's state once it has its own.
    writes: of its replica group, it is the one that writes checkpoints.
    replica_node: the node whose agent keeps replicas of its snapshots; -1: none.
    """

    source: StateSource
    peer: int = -1
    node: int = -1
    sends_to: tuple[int, ...] = ()
    writes: bool = False
    replica_node: int = -1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The state all ranks go on from (`step` steps finished) and what each rank does.

    made: the generation that did that step; 0: none did, for nothing was trained.
    shards: pieces that the state is in; a checkpoint has all of them.
    """

    step: int
    made: int = 0
    ranks: tuple[RankPlan, ...]
    shards: int = 1


def make_plan(holdings: Mapping[int, AvailableState]) -> Plan:
    """Plan for all ranks: one state, and for each replica group where that is.

    holdings: one entry per rank 0..world_size-1.
    A state counts only if every replica group has it. The newest of which all groups have a live
    copy wins: whatever is newer than it was left by ranks that died a step ahead, and doing that
    step again costs less than loading it. Without such a state the newest wins that every group has
    anywhere, each group from the nearest place. Of two states of one step the later made is newer.
    """
    groups: dict[int, dict[int, AvailableState]] = {}
    for rank in sorted(holdings):
        groups.setdefault(holdings[rank].shard, {})[rank] = holdings[rank]
    offers = [_nearest(group.values()) for group in groups.values()]
    live = set.intersection(*({s for s in each if each[s] is StateSource.SELF} for each in offers))
    whole = live or set.intersection(*(set(each) for each in offers))
    chosen = max(whole, default=(0, 0))
    plans: dict[int, RankPlan] = {}
    for group, offer in zip(groups.values(), offers, strict=True):
        plans |= _share(chosen, offer[chosen] if whole else StateSource.FRESH, group)
    for rank, replica_node in _replica_nodes(groups.values()).items():
        plans[rank] = msgspec.structs.replace(plans[rank], replica_node=replica_node)
    step, made = chosen
    in_order = tuple(plans[rank] for rank in sorted(plans))
    return Plan(step=step, made=made, ranks=in_order, shards=len(groups))


def _states(holding: AvailableState) -> dict[StateSource, Collection[Made]]:
    """The states that a rank can bring itself to, by source."""
    return {
        StateSource.SELF: () if holding.live is None else (holding.live,),
        StateSource.SNAPSHOT: holding.snapshots,
        StateSource.REPLICA: [made for _, made in holding.copies],
        StateSource.CHECKPOINT: holding.checkpoints,
    }


def _nearest(group: Iterable[AvailableState]) -> dict[Made, StateSource]:
    """The states that a replica group can reach, each with the nearest source of it."""
    nearest: dict[Made, StateSource] = {}
    for holding in group:
        for source, states in _states(holding).items():
            for made in states:
                nearest[made] = min(source, nearest.get(made, source), key=_DISTANCE.index)
    return nearest


def _share(
    chosen: Made, source: StateSource, group: Mapping[int, AvailableState]
) -> dict[int, RankPlan]:
    """Give every rank of a replica group that has not the source the nearest that has."""
    writer = min(group)
    if source is StateSource.FRESH:
        return {rank: RankPlan(source=source, writes=rank == writer) for rank in group}
    holders = [rank for rank in group if chosen in _states(group[rank])[source]]
    senders = _senders(holders, group)
    peers = {to: rank for rank, receivers in senders.items() for to in receivers}
    plans = {}
    for rank, holding in group.items():
        if rank in peers:
            plans[rank] = RankPlan(source=StateSource.PEER, peer=peers[rank], writes=rank == writer)
            continue
        at = next((node for node, copy in holding.copies if copy == chosen), -1)
        plans[rank] = RankPlan(
            source=source,
            node=at if source is StateSource.REPLICA else -1,
            sends_to=tuple(senders[rank]),
            writes=rank == writer,
        )
    return plans


def _replica_nodes(groups: Collection[Mapping[int, AvailableState]]) -> dict[int, int]:
    """Who keeps copies of whose snapshots, so that no shard is lost with a single node.

    A replica group that spans nodes needs none. Of any other one rank is copied, for the others
    hold the same: to the next node of the ring that they are, in their order.
    """
    homes = {min(group): {holding.node for holding in group.values()} for group in groups}
    nodes = sorted(set().union(*homes.values()))
    after = dict(zip(nodes, [*nodes[1:], *nodes[:1]], strict=True))
    alone = {rank: min(home) for rank, home in homes.items() if len(home) == 1}
    return {rank: after[node] for rank, node in alone.items()} if len(nodes) > 1 else {}


def _senders(holders: list[int], group: Mapping[int, AvailableState]) -> dict[int, list[int]]:
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
