"""A world that continues without some of its nodes."""

from __future__ import annotations

from jobs.driver import Driver
from jobs.elastic import come_back, hold, shrunk, trained
from jobs.trained import SIGKILL, sources

from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Policy, Strategy


def test_the_world_goes_on_without_a_lost_node() -> None:
    """After a node is lost, the other ranks close the gap, keep their state and continue.

    The job requests the node from the engine.
    """
    driver = shrunk()
    assert driver.last(journal.Decided).strategy is Strategy.SHRINK
    forms = driver.sent_by_node(p.FormGeneration)
    assert {node: form.ranks for node, form in forms.items()} == {0: {0: 0, 1: 1}, 2: {4: 2, 5: 3}}
    assert {form.world_size for form in forms.values()} == {4}
    assert driver.last(journal.Formed).world_size == 4
    assert set(sources(driver).values()) == {StateSource.SELF}
    assert driver.last(journal.NodeWanted).node == 1
    assert "node" not in driver.timers
    driver.ready([0, 1, 4, 5])
    assert driver.phase is Phase.TRAINING
    driver.step_of([0, 1, 4, 5], 6)
    assert [i.closed for i in journal.incidents(driver.history)] == [True]


def test_peers_are_called_by_their_places() -> None:
    """A plan names peers by their place in the smaller world, not by their rank."""
    driver = trained()
    driver.lose(1)
    driver.arrive([0, 1, 4], finished=6)
    driver.arrive([5], finished=5)
    plan = driver.sent_by_node(p.FormGeneration)[2].plan
    assert plan[5].source is StateSource.PEER
    assert plan[5].peer == 2
    assert plan[4].sends_to == (3,)


def test_two_nodes_lost_and_too_few_left() -> None:
    """With fewer nodes than the minimum, the job waits for a node."""
    driver = trained(least=2)
    driver.lose(1)
    driver.lose(0)
    decided = [event.strategy for event in driver.recorded(journal.Decided)]
    assert decided == [Strategy.SHRINK, Strategy.RECOVER]
    assert "node" in driver.timers
    assert driver.phase is Phase.REGROUPING
    driver.arrive([4, 5], finished=5)
    assert not driver.sent_by_node(p.FormGeneration)
    driver.hello(0)
    driver.store_up()
    assert driver.spawned_now() == [0, 1]
    driver.spawned()
    driver.arrive([0, 1])
    assert driver.last(journal.Formed).world_size == 4


def test_start_with_fewer_nodes() -> None:
    """The job starts with the minimum number of nodes, and late nodes join afterwards."""
    driver = Driver(nodes=3, processes=2, least=2)
    driver.hello(0)
    driver.hello(2)
    assert not driver.unstarted
    driver.fire("late")
    driver.store_up()
    spawns = driver.sent_by_node(p.Spawn)
    assert {n: (s.world_size, s.first) for n, s in spawns.items()} == {0: (4, 0), 2: (4, 2)}
    driver.spawned()
    driver.arrive([0, 1, 4, 5])
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 2)
    come_back(driver)
    hold(driver)
    driver.arrive([0, 1, 4, 5], finished=3)
    assert driver.last(journal.Formed).world_size == 6


def test_an_untouched_script_starts_anew_with_those_who_are_there() -> None:
    """Without a Session, the world changes its size only at a restart."""
    driver = Driver(nodes=2, processes=2, least=1, policy=Policy(max_restarts=1))
    driver.start()
    driver.lose(1)
    driver.killed()
    driver.fire("late")
    driver.store_up()
    spawn = driver.sent_by_node(p.Spawn)[0]
    assert (spawn.ranks, spawn.world_size, spawn.first) == ((0, 1), 2, 0)
    driver.spawned()
    driver.hello(1)
    assert not driver.unstarted
    for rank in (0, 1):
        driver.exits(rank, code=0)
    assert driver.outcome is True


def test_a_coordinator_that_takes_over_a_smaller_world() -> None:
    """A new coordinator knows which nodes the world continues without."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.lose_coordinator()
    for node in (0, 2):
        live = tuple(
            p.LiveRank(rank=r, pid=driver.pids[r], training=True) for r in (2 * node, 2 * node + 1)
        )
        driver.hello(node, generation=2, ranks=live)
    driver.arrive([0, 1, 4, 5], finished=7)
    driver.store_up()
    formed = driver.last(journal.Formed)
    assert (formed.world_size, formed.step) == (4, 7)


def test_rank_lost_in_the_smaller_world() -> None:
    """A rank that dies in a smaller world restarts on its node."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    driver.exits(5, signal=SIGKILL, finished=6)
    assert driver.last(journal.Decided).strategy is Strategy.RECOVER_IN_PLACE
    spawn = driver.sent_by_node(p.Spawn)[2]
    assert (spawn.ranks, spawn.world_size, spawn.first) == ((5,), 4, 2)
    driver.spawned()
    driver.arrive([0, 1, 4], finished=6)
    driver.arrive([5])
    assert driver.sent_by_node(p.FormGeneration)[2].ranks == {4: 2, 5: 3}
    assert journal.incidents(driver.history)[-1].cause.kind is FaultKind.PROCESS


def test_late_while_all_ranks_are_ended() -> None:
    """The time limit of the start does not affect a restart."""
    driver = trained(policy=Policy(max_restarts=1))
    driver.raises(0)
    driver.lose(1)
    driver.fire("late")
    assert driver.unstarted == []
    driver.killed()
    assert driver.phase is Phase.GATHERING


def test_a_promoted_spare_is_waited_for() -> None:
    """If a spare is promoted when the start's time limit passes, the world waits for it."""
    driver = Driver(nodes=3, processes=1, least=2)
    spare = driver.hello(spare=True)
    driver.hello(0)
    driver.hello(1)
    driver.fire("late")
    assert driver.machine.job.roster.outside == set()
    driver.hello_again(spare, 2, spare=True)
    driver.store_up()
    assert driver.spawned_now() == [0, 1, 2]


def test_shrink_is_not_allowed() -> None:
    """If the policy does not allow shrink, the time limit for a node fails the job."""
    policy = Policy(strategies=(Strategy.RECOVER,))
    driver = trained(policy=policy)
    driver.lose(1)
    driver.fire("node")
    assert driver.last(journal.Decided).strategy is Strategy.FAIL
