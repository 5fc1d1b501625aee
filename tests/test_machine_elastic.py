"""The coordinator's machine in a world that may shrink, and grows again."""

from __future__ import annotations

from jobs.driver import Driver
from jobs.trained import SIGKILL, sources

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.plan import Source
from rekindle.recovery.policy import Policy, Strategy
from rekindle.runtime import protocol as p
from rekindle.runtime.state import Phase


def trained(*, nodes: int = 3, least: int = 1, policy: Policy | None = None) -> Driver:
    """A job of so many nodes with two ranks each that trains, and may go on with `least`."""
    driver = Driver(nodes=nodes, processes=2, least=least, policy=policy)
    driver.train(finished=5)
    return driver


def shrunk(**settings: int) -> Driver:
    """The same after the loss of node 1."""
    driver = trained(**settings)
    driver.lose(1)
    driver.arrive([0, 1, 4, 5], finished=5)
    return driver


def come_back(driver: Driver, node: int = 1) -> None:
    """The node's agent comes, and its ranks arrive."""
    driver.hello(node)
    assert driver.spawned_now() == [2 * node, 2 * node + 1]
    driver.spawned()
    driver.arrive([2 * node, 2 * node + 1])


def test_the_world_goes_on_without_a_lost_node() -> None:
    """Its other ranks close the gap, keep their state, and the engine is asked for the node."""
    driver = shrunk()
    assert driver.last(journal.Decided).strategy is Strategy.SHRINK
    forms = driver.told(p.Form)
    assert {node: form.ranks for node, form in forms.items()} == {0: {0: 0, 1: 1}, 2: {4: 2, 5: 3}}
    assert {form.world_size for form in forms.values()} == {4}
    assert driver.last(journal.Formed).world_size == 4
    assert set(sources(driver).values()) == {Source.SELF}
    assert driver.last(journal.NodeWanted).node == 1
    assert "node" not in driver.timers
    driver.ready([0, 1, 4, 5])
    assert driver.phase is Phase.TRAINING
    driver.step_of([0, 1, 4, 5], 6)
    assert [i.closed for i in journal.incidents(driver.history)] == [True]


def test_peers_are_called_by_their_places() -> None:
    """A rank behind the gap that lags gets its state from a place in the world."""
    driver = trained()
    driver.lose(1)
    driver.arrive([0, 1, 4], finished=6)
    driver.arrive([5], finished=5)
    plan = driver.told(p.Form)[2].plan
    assert plan[5].source is Source.PEER
    assert plan[5].peer == 2
    assert plan[4].sends_to == (3,)


def test_the_world_grows_when_all_ranks_of_a_node_have_arrived() -> None:
    """Training goes on until then; afterwards the new ranks get the state of that step."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    driver.hello(1)
    assert driver.spawned_now() == [2, 3]
    driver.spawned()
    driver.arrive([2])
    assert driver.phase is Phase.TRAINING
    driver.arrive([3])
    assert {node: over.generation for node, over in driver.told(p.Over).items()} == dict.fromkeys(
        range(3), driver.machine.generation
    )
    driver.arrive([0, 1, 4, 5], finished=9)
    forms = driver.told(p.Form)
    assert forms[2].ranks == {4: 4, 5: 5}
    assert forms[1].plan[2].source is Source.PEER
    formed = driver.last(journal.Formed)
    assert (formed.world_size, formed.step, formed.incident) == (6, 9, 0)
    driver.ready(driver.ranks)
    driver.step(10)
    assert len(driver.recorded(journal.Decided)) == 1


def test_a_node_that_comes_while_the_ranks_regroup() -> None:
    """It is started when training goes on, and taken in with the next generation."""
    driver = trained()
    driver.lose(1)
    driver.hello(1)
    assert not driver.unstarted
    driver.arrive([0, 1, 4, 5], finished=5)
    driver.ready([0, 1, 4, 5])
    assert driver.spawned_now() == [2, 3]
    driver.spawned()
    driver.exits(5, signal=SIGKILL)
    driver.spawned()
    driver.arrive([0, 1, 4], finished=5)
    driver.arrive([2, 3])
    driver.arrive([5])
    assert driver.last(journal.Formed).world_size == 6


def test_two_nodes_lost_and_too_few_left() -> None:
    """Below the least number the job waits for a node."""
    driver = trained(least=2)
    driver.lose(1)
    driver.lose(0)
    assert [e.strategy for e in driver.recorded(journal.Decided)] == [
        Strategy.SHRINK,
        Strategy.RECOVER,
    ] or driver.last(journal.Decided).strategy is Strategy.SHRINK
    assert "node" in driver.timers
    assert driver.phase is Phase.REGROUPING
    driver.arrive([4, 5], finished=5)
    assert not driver.told(p.Form)
    driver.hello(0)
    driver.store_up()
    assert driver.spawned_now() == [0, 1]
    driver.spawned()
    driver.arrive([0, 1])
    assert driver.last(journal.Formed).world_size == 4


def test_a_returning_node_that_cannot_take_part() -> None:
    """Its failure is no fault of the job; it is sent home, and not asked for again."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.hello(1)
    driver.spawned()
    wanted = len(driver.recorded(journal.NodeWanted))
    driver.raises(2)
    assert driver.phase is Phase.TRAINING
    assert "raised" in driver.last(journal.NodeLeft).reason
    assert [c.message.status for c in driver.sent(p.Bye)] == [0]
    assert len(driver.recorded(journal.NodeWanted)) == wanted
    assert len(journal.incidents(driver.history)) == 1


def test_a_returning_node_is_lost_again() -> None:
    """Nobody misses it."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.hello(1)
    driver.spawned()
    driver.lose(1)
    assert driver.phase is Phase.TRAINING
    assert driver.last(journal.NodeLeft).node == 1
    come_back(driver)
    assert driver.phase is Phase.REGROUPING


def test_start_with_fewer_nodes() -> None:
    """Nodes that are late do not hold up the others, and come in when they come."""
    driver = Driver(nodes=3, processes=2, least=2)
    driver.hello(0)
    driver.hello(2)
    assert not driver.unstarted
    driver.fire("late")
    driver.store_up()
    spawns = driver.told(p.Spawn)
    assert {n: (s.world_size, s.first) for n, s in spawns.items()} == {0: (4, 0), 2: (4, 2)}
    driver.spawned()
    driver.arrive([0, 1, 4, 5])
    driver.ready([0, 1, 4, 5])
    come_back(driver)
    driver.arrive([0, 1, 4, 5], finished=3)
    assert driver.last(journal.Formed).world_size == 6


def test_an_untouched_script_starts_anew_with_those_who_are_there() -> None:
    """Without a Session the world changes its size at a restart only."""
    driver = Driver(nodes=2, processes=2, least=1, policy=Policy(max_restarts=1))
    driver.start()
    driver.lose(1)
    driver.killed()
    driver.fire("late")
    driver.store_up()
    spawn = driver.told(p.Spawn)[0]
    assert (spawn.ranks, spawn.world_size, spawn.first) == ((0, 1), 2, 0)
    driver.spawned()
    driver.hello(1)
    assert not driver.unstarted
    for rank in (0, 1):
        driver.exits(rank, code=0)
    assert driver.outcome is True


def test_training_is_over_before_a_node_is_taken_in() -> None:
    """Its ranks are not kept waiting for steps that will not come."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.hello(1)
    driver.spawned()
    driver.arrive([2])
    driver.arrive([0, 1, 4, 5], finished=9, done=True)
    assert set(driver.told(p.Dismiss)) == {0, 2}
    assert driver.last(journal.NodeLeft).reason == "training is over"
    for rank in (0, 1, 4, 5):
        driver.exits(rank, code=0)
    assert driver.outcome is True


def test_a_coordinator_that_takes_over_a_smaller_world() -> None:
    """The node that is not there does not hold up the others for long."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.lose_coordinator()
    for node in (0, 2):
        live = tuple(
            p.LiveRank(rank=r, pid=driver.pids[r], training=True) for r in (2 * node, 2 * node + 1)
        )
        driver.hello(node, generation=2, ranks=live)
    driver.arrive([0, 1, 4, 5], finished=7)
    assert driver.phase is Phase.REGROUPING
    driver.fire("late")
    driver.store_up()
    formed = driver.last(journal.Formed)
    assert (formed.world_size, formed.step) == (4, 7)


def test_ranks_of_a_node_that_was_left_out_come_back() -> None:
    """Their state is of a world that is gone: the agent ends, and another one comes."""
    driver = trained()
    old = tuple(p.LiveRank(rank=r, pid=driver.pids[r], training=True) for r in (2, 3))
    driver.lose(1)
    driver.hello(1, generation=1, ranks=old)
    (refused,) = driver.sent(p.Refused)
    assert "has gone on without" in refused.message.reason


def test_rank_lost_in_the_smaller_world() -> None:
    """It is replaced as ever."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    driver.exits(5, signal=SIGKILL, finished=6)
    assert driver.last(journal.Decided).strategy is Strategy.RECOVER_IN_PLACE
    spawn = driver.told(p.Spawn)[2]
    assert (spawn.ranks, spawn.world_size, spawn.first) == ((5,), 4, 2)
    driver.spawned()
    driver.arrive([0, 1, 4], finished=6)
    driver.arrive([5])
    assert driver.told(p.Form)[2].ranks == {4: 2, 5: 3}
    assert journal.incidents(driver.history)[-1].cause.kind is Kind.PROCESS
