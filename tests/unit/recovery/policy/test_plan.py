"""The plan: the newest step of any intact copy, without the state of a torn rank."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.policy.plan import AvailableState, RankPlan, StateSource, make_plan
from rekindle.states import StateId

states = st.tuples(st.integers(0, 6), st.integers(0, 2))  # step, and generation
kept = st.lists(states, max_size=3).map(tuple)
holdings = st.lists(
    st.builds(
        AvailableState,
        node=st.integers(0, 2),
        shard=st.integers(0, 2),
        live=st.none() | states,
        snapshots=kept,
        copies=st.lists(st.tuples(st.integers(0, 2), states), max_size=2).map(tuple),
        checkpoints=kept,
    ),
    min_size=1,
    max_size=8,
).map(lambda found: dict(enumerate(found)))


def at(*steps: int) -> tuple[StateId, ...]:
    """Return states of one generation."""
    return tuple((step, 1) for step in steps)


def live(held: dict[int, AvailableState]) -> set[StateId]:
    return {h.live for h in held.values() if h.live is not None}


def anywhere(held: dict[int, AvailableState]) -> set[StateId]:
    lists = [(*h.snapshots, *h.checkpoints, *(s for _, s in h.copies)) for h in held.values()]
    return live(held).union(*lists)


def groups(held: dict[int, AvailableState]) -> list[dict[int, AvailableState]]:
    """Return the replica groups."""
    shards = {h.shard for h in held.values()}
    return [{r: h for r, h in held.items() if h.shard == shard} for shard in shards]


def common(
    held: dict[int, AvailableState], where: Callable[[dict[int, AvailableState]], set[StateId]]
) -> set[StateId]:
    """Return the states that all replica groups have at this kind of source."""
    return set.intersection(*(where(group) for group in groups(held)))


@given(holdings)
def test_live_state_wins_and_the_newest_of_it(held: dict[int, AvailableState]) -> None:
    """If each replica group has a live copy of one state, all ranks take the newest such state."""
    states = common(held, live)
    if states:
        plan = make_plan(held)
        assert (plan.step, plan.state_generation) == max(states)
        assert {own.source for own in plan.ranks} <= {StateSource.SELF, StateSource.PEER}


@given(holdings)
def test_every_rank_gets_the_planned_step(held: dict[int, AvailableState]) -> None:
    """Each source holds exactly the planned state, including its generation."""
    plan = make_plan(held)
    state = plan.step, plan.state_generation
    for rank, own in enumerate(plan.ranks):
        giver = held[rank] if own.source is not StateSource.PEER else None
        match own.source:
            case StateSource.SELF:
                assert giver is not None
                assert giver.live == state
            case StateSource.SNAPSHOT:
                assert giver is not None
                assert state in giver.snapshots
            case StateSource.REPLICA:
                assert giver is not None
                assert (own.node, state) in giver.copies
            case StateSource.CHECKPOINT:
                assert giver is not None
                assert state in giver.checkpoints
            case StateSource.PEER:
                assert rank in plan.ranks[own.peer].sends_to
                assert plan.ranks[own.peer].source is not StateSource.PEER
                assert held[own.peer].shard == held[rank].shard
            case StateSource.FRESH:
                assert state == (0, 0)


@given(holdings)
def test_who_sends_is_who_is_expected_to(held: dict[int, AvailableState]) -> None:
    """Each sender has a receiver that expects it, so no transfer waits without end."""
    plan = make_plan(held)
    sends = {(r, to) for r, own in enumerate(plan.ranks) for to in own.sends_to}
    receives = {(own.peer, r) for r, own in enumerate(plan.ranks) if own.source is StateSource.PEER}
    assert sends == receives


@given(holdings)
def test_without_live_state_the_newest_complete_copy_wins(held: dict[int, AvailableState]) -> None:
    """Without a common live state, all ranks take the newest state that is complete.

    If no state is complete, all ranks start fresh.
    """
    plan = make_plan(held)
    if not common(held, live):
        states = common(held, anywhere)
        assert (plan.step, plan.state_generation) == max(states, default=(0, 0))
        fresh = {own.source for own in plan.ranks} == {StateSource.FRESH}
        assert fresh == (not states)


@given(holdings)
def test_each_group_takes_the_nearest_source(held: dict[int, AvailableState]) -> None:
    """A replica group takes no distant source if one of its ranks has a nearer one."""
    plan = make_plan(held)
    for group in groups(held) if common(held, anywhere) else ():
        sources = {plan.ranks[rank].source for rank in group} - {StateSource.PEER}
        assert len(sources) == 1
        order = list(StateSource)
        nearer = order[: order.index(sources.pop())]
        for rank, holding in group.items():
            alone = make_plan({0: holding})
            same = (alone.step, alone.state_generation) == (plan.step, plan.state_generation)
            assert not same or alone.ranks[0].source not in nearer, rank


@given(holdings)
def test_each_shard_has_one_writer(held: dict[int, AvailableState]) -> None:
    """Each shard of a checkpoint has exactly one writer."""
    plan = make_plan(held)
    writers = [held[rank].shard for rank, own in enumerate(plan.ranks) if own.writes]
    assert sorted(writers) == sorted({h.shard for h in held.values()})
    assert plan.shards == len(writers)


def test_one_dead_rank_of_four_costs_one_transfer() -> None:
    """If one of four ranks dies, three keep their state. It gets its state on its own node."""
    held = {r: AvailableState(node=r // 2, live=(7, 1)) for r in range(4)}
    held[3] = AvailableState(node=1)
    plan = make_plan(held)
    assert [own.source for own in plan.ranks].count(StateSource.SELF) == 3
    assert plan.ranks[3].peer == 2


def test_of_equals_the_snapshot() -> None:
    """At the same step, the plan prefers a snapshot to a checkpoint, because it is nearer.

    A newer checkpoint wins.
    """
    held = {
        0: AvailableState(node=0, snapshots=at(4, 6), checkpoints=at(6, 2)),
        1: AvailableState(node=1),
    }
    plan = make_plan(held)
    assert (plan.step, plan.ranks[0].source) == (6, StateSource.SNAPSHOT)
    held[1] = AvailableState(node=1, checkpoints=at(8))
    plan = make_plan(held)
    assert (plan.step, plan.ranks[1].source) == (8, StateSource.CHECKPOINT)
    assert plan.ranks[0] == RankPlan(source=StateSource.PEER, peer=1, writes=True)


def test_a_rank_one_step_behind_gets_the_newer_state() -> None:
    """A rank one step behind takes the newer state, although its own is complete."""
    live = [(5, 1), (4, 1), (5, 1)]
    held = {rank: AvailableState(node=0, live=state) for rank, state in enumerate(live)}
    plan = make_plan(held)
    assert (plan.step, plan.state_generation) == (5, 1)
    sources = [rank.source for rank in plan.ranks]
    assert sources == [StateSource.SELF, StateSource.PEER, StateSource.SELF]
    assert plan.ranks[plan.ranks[1].peer].sends_to == (1,)


def test_two_ways_to_do_a_step_are_two_states() -> None:
    """If two shards have step 8 from different passes, the plan uses an older common state."""
    held = {
        0: AvailableState(node=0, shard=0, snapshots=((8, 1), (5, 1))),
        1: AvailableState(node=1, shard=1, snapshots=((8, 3), (5, 1))),
    }
    plan = make_plan(held)
    assert (plan.step, plan.state_generation) == (5, 1)
    held[0] = AvailableState(node=0, shard=0, snapshots=((8, 1), (8, 3)))
    held[1] = AvailableState(node=1, shard=1, checkpoints=((8, 3), (8, 1)))
    plan = make_plan(held)
    assert (plan.step, plan.state_generation) == (8, 3)


def test_a_lost_shard_takes_all_back_to_its_snapshot() -> None:
    """If a shard is lost, its copies on another node decide the step of all ranks."""
    held = {r: AvailableState(node=r, shard=r, live=(9, 1), snapshots=at(4, 8)) for r in range(4)}
    held[2] = AvailableState(node=2, shard=2, copies=((3, (4, 1)), (3, (8, 1))))
    plan = make_plan(held)
    assert plan.step == 8
    taken = {r: own.source for r, own in enumerate(plan.ranks)}
    assert taken == dict.fromkeys(range(4), StateSource.SNAPSHOT) | {2: StateSource.REPLICA}
    assert plan.ranks[2].node == 3


def test_a_replica_keeps_all_where_they_are() -> None:
    """If a lost shard has a live replica, no step is lost."""
    held = {r: AvailableState(node=r, shard=r % 2, live=(9, 1), snapshots=at(8)) for r in range(4)}
    held[2] = AvailableState(node=2, shard=0, copies=((3, (8, 1)),))
    plan = make_plan(held)
    assert plan.step == 9
    assert plan.ranks[2] == RankPlan(source=StateSource.PEER, peer=0)


def test_snapshots_of_different_steps_are_never_mixed() -> None:
    """If the newest snapshots of two ranks differ, the newest common step counts."""
    held = {
        0: AvailableState(node=0, shard=0, snapshots=at(5, 10)),
        1: AvailableState(node=1, shard=1, snapshots=at(10, 15)),
    }
    assert make_plan(held).step == 10


@given(holdings)
def test_any_one_node_may_be_lost(held: dict[int, AvailableState]) -> None:
    """After the loss of any node, each shard exists elsewhere.

    Each shard has replicas on two nodes, or another node keeps copies of one of its ranks.
    """
    replica_nodes = [own.replica_node for own in make_plan(held).ranks]
    nodes = {h.node for h in held.values()}
    for group in groups(held):
        homes = {h.node for h in group.values()}
        kept = {replica_nodes[rank] for rank in group} - {-1}
        assert kept <= nodes - homes
        assert len(kept) == (len(homes) == 1 < len(nodes))
        assert sum(replica_nodes[rank] >= 0 for rank in group) == len(kept)


def test_copies_go_round_a_ring() -> None:
    """Each node keeps the copies of the node before it, whatever their numbers are."""
    held = {r: AvailableState(node=(r // 2) * 3, shard=r) for r in range(6)}
    assert [own.replica_node for own in make_plan(held).ranks] == [3, 3, 6, 6, 0, 0]


def test_one_rank_of_a_node_is_copied_for_all_that_hold_the_same() -> None:
    """If two ranks of one node hold a shard, only one of them is copied.

    Here shard 0 is only on node 0, and shard 1 is on both nodes.
    """
    held = {r: AvailableState(node=r // 2, shard=max(0, r - 1)) for r in range(4)}
    held[3] = AvailableState(node=0, shard=1)
    held[2] = AvailableState(node=1, shard=1)
    assert [own.replica_node for own in make_plan(held).ranks] == [1, -1, -1, -1]


def test_a_peer_counts_only_with_the_own_part_of_each_rank() -> None:
    """A live state without a rank's own part loses against an older one, and a snapshot has all."""
    dead = AvailableState(node=0, own=at(7, 6))
    ahead = AvailableState(node=0, live=StateId(8, 1), own=at(8, 7), snapshots=at(5))
    plan = make_plan({0: ahead, 1: dead})
    assert (plan.step, plan.ranks[0].source) == (5, StateSource.SNAPSHOT)
    behind = AvailableState(node=0, live=StateId(7, 1), own=at(7, 6))
    plan = make_plan({0: ahead, 1: dead, 2: behind})
    assert (plan.step, plan.ranks[2].source) == (7, StateSource.SELF)
    assert [plan.ranks[rank].peer for rank in (0, 1)] == [2, 2]
