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


def hold(driver: Driver) -> None:
    """The first rank of the world is asked to hold between two steps, and does."""
    ((node, order),) = driver.told(p.Hold).items()
    assert order.rank == driver.machine.roster.world[0].rank
    driver.say(node, p.Held(rank=order.rank, generation=order.generation))


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
    assert not driver.told(p.Hold)
    driver.arrive([3])
    assert driver.phase is Phase.TRAINING
    hold(driver)
    assert set(driver.told(p.Over)) == {0, 1, 2}
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
    decided = [event.strategy for event in driver.recorded(journal.Decided)]
    assert decided == [Strategy.SHRINK, Strategy.RECOVER]
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
    assert [e.node for e in driver.recorded(journal.NodeWanted)] == [1, 1]
    come_back(driver)
    driver.step_of([0, 1, 4, 5], 6)
    hold(driver)
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
    driver.step_of([0, 1, 4, 5], 2)
    come_back(driver)
    hold(driver)
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
    """It knows which nodes the world went on without."""
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


def test_ranks_of_a_node_that_was_left_out_come_back() -> None:
    """Their state is of a world that is gone: they are ended, and started anew."""
    driver = shrunk()
    old = tuple(p.LiveRank(rank=r, pid=900 + r, training=True) for r in (2, 3))
    driver.ready([0, 1, 4, 5])
    driver.hello(1, generation=1, ranks=old)
    assert driver.told(p.Kill)[1].ranks == (2, 3)
    driver.pids |= {2: 902, 3: 903}
    driver.killed()
    assert driver.spawned_now() == [2, 3]


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


def grown() -> Driver:
    """A world that has just been formed with a node that came back."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    come_back(driver)
    hold(driver)
    driver.arrive([0, 1, 4, 5], finished=9)
    assert driver.last(journal.Formed).world_size == 6
    return driver


def test_a_newcomer_fails_before_its_first_step() -> None:
    """The others go on without it, and no budget is charged."""
    driver = grown()
    driver.raises(2)
    assert driver.last(journal.NodeLeft).node == 1
    driver.arrive([0, 1, 4, 5], finished=9)
    assert driver.last(journal.Formed).world_size == 4
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 10)
    assert len(journal.incidents(driver.history)) == 1


def test_a_newcomer_that_nobody_can_talk_to() -> None:
    """Links that break before the first step with it are its fault: it may try again, outside."""
    driver = grown()
    driver.fail_step(0)
    driver.arrive([0, 1, 4, 5], finished=9)
    driver.arrive([2, 3])
    assert driver.told(p.Kill)[1].ranks == (2, 3)
    assert driver.last(journal.Formed).world_size == 4
    assert driver.last(journal.Formed).left_out == (1,)
    driver.killed()
    driver.ready([0, 1, 4, 5])
    assert driver.spawned_now() == [2, 3]


def test_a_member_dies_and_its_links_break_first() -> None:
    """The newcomer is not blamed for it."""
    driver = grown()
    driver.fail_step(0)
    driver.exits(5, signal=SIGKILL)
    assert driver.last(journal.Decided).strategy is Strategy.RECOVER_IN_PLACE
    driver.spawned()
    driver.arrive([0, 1, 4], finished=9)
    driver.arrive([2, 3, 5])
    assert driver.last(journal.Formed).world_size == 6


def test_newcomers_that_are_needed() -> None:
    """When the others are gone, a newcomer is a member as any other."""
    driver = grown()
    driver.lose(0)
    driver.lose(2)
    driver.raises(2)
    assert driver.last(journal.Decided).strategy is Strategy.FAIL
    driver.killed()
    assert driver.outcome is False


def test_a_newcomer_is_lost_when_all_others_wait() -> None:
    """Nobody waits for it any more, nor for the store that it was asked for."""
    driver = grown()
    driver.exits(5, signal=SIGKILL)
    driver.spawned()
    driver.arrive([0, 1, 4], finished=9)
    driver.arrive([5])
    driver.lose(1)
    assert driver.last(journal.Formed).world_size == 4


def test_a_node_at_the_door_counts() -> None:
    """With it enough are left: the world takes it in instead of the one that is lost."""
    driver = shrunk(least=2)
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    come_back(driver)
    driver.lose(2)
    assert driver.last(journal.Decided).strategy is Strategy.SHRINK
    driver.arrive([0, 1], finished=6)
    formed = driver.last(journal.Formed)
    assert (formed.world_size, formed.left_out) == (4, (2,))


def test_a_script_error_after_training_is_none_of_a_newcomer() -> None:
    """Trials end with the training."""
    driver = grown()
    driver.ready(driver.ranks)
    driver.arrive(driver.ranks, finished=9, done=True)
    assert driver.told(p.Dismiss)
    driver.raises(2)
    assert driver.last(journal.Decided).strategy is Strategy.FAIL


def test_a_newcomer_is_lost_before_its_first_step() -> None:
    """As if it had never come; another one is asked for."""
    driver = grown()
    driver.lose(1)
    driver.arrive([0, 1, 4, 5], finished=9)
    assert driver.last(journal.Formed).world_size == 4
    assert len(journal.incidents(driver.history)) == 1


def test_a_member_fails_while_newcomers_are_taken_in() -> None:
    """That is a fault as any other."""
    driver = grown()
    driver.exits(5, signal=SIGKILL)
    assert driver.last(journal.Decided).strategy is Strategy.RECOVER_IN_PLACE


def test_the_world_grows_once_a_step_at_most() -> None:
    """Nodes that come one by one do not keep it from going on."""
    driver = trained(nodes=4)
    driver.lose(1)
    driver.lose(2)
    members = [0, 1, 6, 7]
    driver.arrive(members, finished=5)
    driver.ready(members)
    driver.step_of(members, 6)
    driver.hello(1)
    driver.hello(2)
    driver.spawned()
    driver.arrive([2, 3])
    hold(driver)
    driver.arrive([4, 5])
    driver.arrive(members, finished=6)
    assert driver.last(journal.Formed).world_size == 8
    driver.ready(driver.ranks)
    driver.step(7)
    assert not driver.told(p.Hold)


def test_nobody_is_taken_in_when_the_first_are_done() -> None:
    """A script that ends is not disturbed."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    driver.exits(0, code=0)
    come_back(driver)
    assert not driver.told(p.Hold)
    for rank in (1, 4, 5):
        driver.exits(rank, code=0)
    assert driver.outcome is True


def test_a_returning_node_that_never_arrives() -> None:
    """It is sent home when its time is over."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.hello(1)
    driver.spawned()
    driver.fire("come")
    assert "did not reach their Session" in driver.last(journal.NodeLeft).reason
    assert driver.phase is Phase.TRAINING


def test_a_node_that_comes_while_too_few_are_left() -> None:
    """Whichever it is, the job goes on as soon as enough are there."""
    driver = trained(least=2)
    driver.lose(1)
    driver.lose(2)
    driver.hello(1)
    driver.fire("node")
    assert driver.spawned_now() == [2, 3]
    driver.spawned()
    driver.arrive([0, 1], finished=5)
    driver.arrive([2, 3])
    assert driver.last(journal.Formed).world_size == 4
    assert driver.outcome is None


def test_late_while_all_ranks_are_ended() -> None:
    """A restart is not disturbed by the time limit of the start."""
    driver = trained(policy=Policy(max_restarts=1))
    driver.raises(0)
    driver.lose(1)
    driver.fire("late")
    assert driver.unstarted == []
    driver.killed()
    assert driver.phase is Phase.GATHERING


def test_a_promoted_spare_is_waited_for() -> None:
    """Its place is not left out in the same breath."""
    driver = Driver(nodes=3, processes=1, least=2)
    spare = driver.hello(spare=True)
    driver.hello(0)
    driver.hello(1)
    driver.fire("late")
    assert driver.machine.roster.outside == set()
    driver.hello_again(spare, 2, spare=True)
    driver.store_up()
    assert driver.spawned_now() == [0, 1, 2]


def test_shrink_is_not_allowed() -> None:
    """Then no time limit does it either."""
    policy = Policy(strategies=(Strategy.RECOVER,))
    driver = trained(policy=policy)
    driver.lose(1)
    driver.fire("node")
    assert driver.last(journal.Decided).strategy is Strategy.FAIL


def test_a_line_that_is_used_again() -> None:
    """Who was sent home is forgotten with its line."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    line = driver.hello(1)
    driver.spawned()
    driver.raises(2)
    assert driver.machine.sent_home == {line}
    driver.lose_spare(line)
    assert driver.machine.sent_home == set()


def test_a_coming_rank_ends_when_the_job_does() -> None:
    """Its end holds nobody up, and is no news after the end."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.hello(1)
    driver.stop()
    driver.spawned()
    for rank in (0, 1, 4, 5):
        driver.exits(rank, signal=15)
    for rank in (2, 3):
        driver.exits(rank, code=1)
    assert driver.outcome is False
    assert isinstance(driver.history[-1], journal.Ended)
