"""The coordinator's machine and nodes that come to a world that goes on without them."""

from __future__ import annotations

from jobs.elastic import come_back, grown, hold, shrunk, trained
from jobs.trained import SIGKILL

from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Strategy


def test_the_world_grows_when_all_ranks_of_a_node_have_arrived() -> None:
    """Training goes on until then; afterwards the new ranks get the state of that step."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    driver.hello(1)
    assert driver.spawned_now() == [2, 3]
    driver.spawned()
    driver.arrive([2])
    assert not driver.told(p.PauseRequest)
    driver.arrive([3])
    assert driver.phase is Phase.TRAINING
    hold(driver)
    assert set(driver.told(p.GenerationEnded)) == {0, 1, 2}
    driver.arrive([0, 1, 4, 5], finished=9)
    forms = driver.told(p.FormGeneration)
    assert forms[2].ranks == {4: 4, 5: 5}
    assert forms[1].plan[2].source is StateSource.PEER
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
    assert not driver.told(p.PauseRequest)


def test_nobody_is_taken_in_when_the_first_are_done() -> None:
    """A script that ends is not disturbed."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    driver.exits(0, code=0)
    come_back(driver)
    assert not driver.told(p.PauseRequest)
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


def test_a_line_that_is_used_again() -> None:
    """Who was sent home is forgotten with its line."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    line = driver.hello(1)
    driver.spawned()
    driver.raises(2)
    assert driver.machine.job.sent_home == {line}
    driver.lose_spare(line)
    assert driver.machine.job.sent_home == set()


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
