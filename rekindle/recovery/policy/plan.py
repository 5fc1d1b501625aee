"""Plan a regroup: the step from which every rank continues, and the source of its state. Pure."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Collection, Mapping

import msgspec

from rekindle.states import StateId


class StateSource(str, enum.Enum):
    """Name the sources of a rank's training state, the nearest first."""

    SELF = "self"  # its own memory is valid
    PEER = "peer"  # another rank sends it
    SNAPSHOT = "snapshot"  # the memory of its agent
    REPLICA = "replica"  # the memory of another agent
    CHECKPOINT = "checkpoint"  # the store
    FRESH = "fresh"  # as the script built it, before any training


_DISTANCE = list(StateSource)


class AvailableState(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the states that a rank can offer at a regroup.

    - `shard`: the part of the training state that the rank holds. Ranks of the same shard are a
      replica group and hold the same state. Data-parallel training has one shard.
    - `live`: its current state. None: it just started, or it was interrupted during a change.
    - `snapshots`: the snapshots of the rank that its node's agent has.
    - `copies`: the snapshots of the rank that agents of other nodes have, as (node, state).
    - `checkpoints`: the checkpoints that its node can read; they hold all shards.
    - `own`: the states of which its agent has the part that this rank shares with no other. None:
      there is no such part. Snapshots and checkpoints have these parts of all ranks.
    """

    node: int
    shard: int = 0
    live: StateId | None = None
    snapshots: tuple[StateId, ...] = ()
    copies: tuple[tuple[int, StateId], ...] = ()
    checkpoints: tuple[StateId, ...] = ()
    own: tuple[StateId, ...] | None = None

    def completes(self, state: StateId) -> bool:
        """Return whether the rank has its own part of this state: a peer has all else."""
        return self.own is None or state in self.own or state == self.live


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the action of a rank: it takes its state from `source`.

    - `peer`: the rank that sends the state, if the source is PEER.
    - `node`: the node whose agent has the state, if the source is REPLICA.
    - `sends_to`: the ranks that receive this rank's state after it has its own.
    - `writes`: this rank writes the checkpoints of its replica group.
    - `replica_node`: the node whose agent keeps replicas of its snapshots; -1: none.
    """

    source: StateSource
    peer: int = -1
    node: int = -1
    sends_to: tuple[int, ...] = ()
    writes: bool = False
    replica_node: int = -1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the state from which all ranks continue (`step` steps finished), and each rank's action.

    `state_generation` is the generation that did that step; 0 means that nothing was trained.
    `shards` is the number of parts of the state; a checkpoint has all of them.
    """

    step: int
    state_generation: int = 0
    ranks: tuple[RankPlan, ...]
    shards: int = 1


def make_plan(holdings: Mapping[int, AvailableState]) -> Plan:
    """Return the plan for all ranks: one state, and its source for each replica group.

    `holdings` has one entry for each rank 0..world_size-1.

    A state counts only if every replica group has it. The newest state with a live copy in all
    groups wins. Newer states come from failed ranks that were one step ahead. To repeat that step
    costs less than to load it. Without such a state, the newest state that every group has anywhere
    wins. Each group takes it from the nearest source. If two states have the same step, the one
    from the later generation is newer.
    """
    groups: dict[int, dict[int, AvailableState]] = {}
    for rank in sorted(holdings):
        groups.setdefault(holdings[rank].shard, {})[rank] = holdings[rank]
    offers = [_nearest(group.values()) for group in groups.values()]
    live = set.intersection(*({s for s in each if each[s] is StateSource.SELF} for each in offers))
    whole = live or set.intersection(*(set(each) for each in offers))
    chosen = max(whole, default=StateId(0, 0))
    plans: dict[int, RankPlan] = {}
    for group, offer in zip(groups.values(), offers, strict=True):
        plans |= _share(chosen, offer[chosen] if whole else StateSource.FRESH, group)
    for rank, replica_node in _replica_nodes(groups.values()).items():
        plans[rank] = msgspec.structs.replace(plans[rank], replica_node=replica_node)
    step, generation = chosen
    in_order = tuple(plans[rank] for rank in sorted(plans))
    return Plan(step=step, state_generation=generation, ranks=in_order, shards=len(groups))


def _states(holding: AvailableState) -> dict[StateSource, Collection[StateId]]:
    """Return the states that a rank can reach without other ranks, by source."""
    return {
        StateSource.SELF: () if holding.live is None else (holding.live,),
        StateSource.SNAPSHOT: holding.snapshots,
        StateSource.REPLICA: [state for _, state in holding.copies],
        StateSource.CHECKPOINT: holding.checkpoints,
    }


def _nearest(group: Collection[AvailableState]) -> dict[StateId, StateSource]:
    """Return the states that a replica group can reach, each with its nearest source.

    A live state counts only if each rank of the group has its own part of it.
    """
    alive = {holding.live for holding in group if holding.live is not None}
    whole = {state for state in alive if all(holding.completes(state) for holding in group)}
    nearest: dict[StateId, StateSource] = {}
    for holding in group:
        for source, states in _states(holding).items():
            for state in states:
                if source is StateSource.SELF and state not in whole:
                    continue
                nearest[state] = min(source, nearest.get(state, source), key=_DISTANCE.index)
    return nearest


def _share(
    chosen: StateId, source: StateSource, group: Mapping[int, AvailableState]
) -> dict[int, RankPlan]:
    """Return the plans of a replica group; ranks without the source get the nearest sender."""
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
    """Return the node that keeps replicas for each rank, so that one lost node loses no shard.

    A replica group on several nodes does not need copies. Every other group needs a copy of only
    one rank, because its ranks hold the same state. The copy goes to the next node, in the ring of
    all nodes by number.
    """
    homes = {min(group): {holding.node for holding in group.values()} for group in groups}
    nodes = sorted(set().union(*homes.values()))
    after = dict(zip(nodes, [*nodes[1:], *nodes[:1]], strict=True))
    alone = {rank: min(home) for rank, home in homes.items() if len(home) == 1}
    return {rank: after[node] for rank, node in alone.items()} if len(nodes) > 1 else {}


def _senders(holders: list[int], group: Mapping[int, AvailableState]) -> dict[int, list[int]]:
    """Return the receivers of each sender: a rank gets the nearest of the least busy senders."""
    senders: dict[int, list[int]] = {rank: [] for rank in holders}
    idlest = [(0, rank) for rank in holders]  # a heap: number of receivers, sender
    on_node: dict[int, list[int]] = {}
    for rank in holders:
        on_node.setdefault(group[rank].node, []).append(rank)
    for rank, holding in group.items():
        if rank in senders:
            continue
        # this heap entry is stale, because the sender got receivers as the nearest one
        while idlest[0][0] < len(senders[idlest[0][1]]):
            first = idlest[0][1]
            heapq.heapreplace(idlest, (len(senders[first]), first))
        least, first = idlest[0]
        near = (h for h in on_node.get(holding.node, ()) if len(senders[h]) == least)
        senders[next(near, first)].append(rank)
    return senders


def shard_error(rank: int, former: int | None, shard: int | None, nodes: tuple[int, int]) -> str:
    """Return why a rank cannot have this shard of the training state; an empty text if it can.

    former: the shard that it had before. nodes: the least and the greatest number of nodes.
    """
    least, most = nodes
    if former not in (None, shard):
        return (
            f"rank {rank} has shard {shard} of the training state, but had shard {former} before; "
            "choose the shard from the rank's number only"
        )
    if shard is not None and least < most:
        return (
            f"rank {rank} has a shard of the training state, so a world of fewer nodes would not "
            f"have all shards; run the job with --nnodes={most}, not with {least}:{most}"
        )
    return ""
