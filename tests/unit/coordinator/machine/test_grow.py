"""Nodes that return to a world that continued without them."""

from __future__ import annotations

from jobs.elastic import come_back, grown, hold, shrunk, trained
from jobs.trained import SIGKILL

from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Strategy


def test_the_world_grows_when_all_ranks_of_a_node_have_arrived() -> None:
    """The world grows when all ranks of a node have arrived. Training continues until then.

    The new ranks then get the state of that step.
    """
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    driver.hello(1)
    assert driver.spawned_now() == [2, 3]
    driver.spawned()
    driver.arrive([2])
    assert not driver.sent_by_node(p.PauseRequest)
    driver.arrive([3])
    assert driver.phase is Phase.TRAINING
    hold(driver)
    assert set(driver.sent_by_node(p.GenerationEnded)) == {0, 1, 2}
    driver.arrive([0, 1, 4, 5], finished=9)
    forms = driver.sent_by_node(p.FormGeneration)
    assert forms[2].ranks == {4: 4, 5: 5}
    assert forms[1].plan[2].source is StateSource.PEER
    formed = driver.last(journal.Formed)
    assert (formed.world_size, formed.step, formed.incident) == (6, 9, 0)
    driver.ready(driver.ranks)
    driver.step(10)
    assert len(driver.recorded(journal.Decided)) == 1


def test_a_node_that_comes_while_the_ranks_regroup() -> None:
    """A node that arrives during a regroup starts when training resumes.

    It joins in the next generation.
    """
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
    """If a returning node fails, it leaves the job without an incident or another request."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.hello(1)
    driver.spawned()
    wanted = len(driver.recorded(journal.NodeWanted))
    driver.raises(2)
    assert driver.phase is Phase.TRAINING
    assert "raised" in driver.last(journal.NodeLeft).reason
    assert [c.message.status for c in driver.sent(p.EndAgent)] == [0]
    assert len(driver.recorded(journal.NodeWanted)) == wanted
    assert len(journal.incidents(driver.history)) == 1


def test_a_returning_node_is_lost_again() -> None:
    """If a returning node is lost again, training continues and the job requests the node again."""
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
    """If training ends before a returning node joins, the node leaves the job."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.hello(1)
    driver.spawned()
    driver.arrive([2])
    driver.arrive([0, 1, 4, 5], finished=9, done=True)
    assert set(driver.sent_by_node(p.EndSession)) == {0, 2}
    assert driver.last(journal.NodeLeft).reason == "training is over"
    for rank in (0, 1, 4, 5):
        driver.exits(rank, code=0)
    assert driver.outcome is True


def test_ranks_of_a_node_that_was_left_out_come_back() -> None:
    """Ranks that return with the state of an old world are killed and started again."""
    driver = shrunk()
    old = tuple(p.LiveRank(rank=r, pid=900 + r, training=True) for r in (2, 3))
    driver.ready([0, 1, 4, 5])
    driver.hello(1, generation=1, ranks=old)
    assert driver.sent_by_node(p.Kill)[1].ranks == (2, 3)
    driver.pids |= {2: 902, 3: 903}
    driver.killed()
    assert driver.spawned_now() == [2, 3]


def test_a_newcomer_fails_before_its_first_step() -> None:
    """If a new node fails before its first step, the others continue without a new incident."""
    driver = grown()
    driver.raises(2)
    assert driver.last(journal.NodeLeft).node == 1
    driver.arrive([0, 1, 4, 5], finished=9)
    assert driver.last(journal.Formed).world_size == 4
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 10)
    assert len(journal.incidents(driver.history)) == 1


def test_a_newcomer_that_nobody_can_talk_to() -> None:
    """If links break before the first step with a new node, the world continues without the node.

    The node may try again outside the world.
    """
    driver = grown()
    driver.fail_step(0)
    driver.arrive([0, 1, 4, 5], finished=9)
    driver.arrive([2, 3])
    assert driver.sent_by_node(p.Kill)[1].ranks == (2, 3)
    assert driver.last(journal.Formed).world_size == 4
    assert driver.last(journal.Formed).left_out == (1,)
    driver.killed()
    driver.ready([0, 1, 4, 5])
    assert driver.spawned_now() == [2, 3]


def test_a_member_dies_and_its_links_break_first() -> None:
    """If a member dies after its links break, the new node stays in the world."""
    driver = grown()
    driver.fail_step(0)
    driver.exits(5, signal=SIGKILL)
    assert driver.last(journal.Decided).strategy is Strategy.RECOVER_IN_PLACE
    driver.spawned()
    driver.arrive([0, 1, 4], finished=9)
    driver.arrive([2, 3, 5])
    assert driver.last(journal.Formed).world_size == 6


def test_newcomers_that_are_needed() -> None:
    """When the other nodes are gone, an error on a new node fails the job like any other error."""
    driver = grown()
    driver.lose(0)
    driver.lose(2)
    driver.raises(2)
    assert driver.last(journal.Decided).strategy is Strategy.FAIL
    driver.killed()
    assert driver.outcome is False


def test_a_newcomer_is_lost_when_all_others_wait() -> None:
    """If a new node is lost while all others wait, the next generation forms without it."""
    driver = grown()
    driver.exits(5, signal=SIGKILL)
    driver.spawned()
    driver.arrive([0, 1, 4], finished=9)
    driver.arrive([5])
    driver.lose(1)
    assert driver.last(journal.Formed).world_size == 4


def test_a_node_at_the_door_counts() -> None:
    """A node that waits to join counts toward the least number of nodes.

    The world takes it instead of the lost node.
    """
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
    """After the end of training, an error on a new node's rank is an error of the script."""
    driver = grown()
    driver.ready(driver.ranks)
    driver.arrive(driver.ranks, finished=9, done=True)
    assert driver.sent_by_node(p.EndSession)
    driver.raises(2)
    assert driver.last(journal.Decided).strategy is Strategy.FAIL


def test_a_newcomer_is_lost_before_its_first_step() -> None:
    """If a new node is lost before its first step, the world continues without a new incident."""
    driver = grown()
    driver.lose(1)
    driver.arrive([0, 1, 4, 5], finished=9)
    assert driver.last(journal.Formed).world_size == 4
    assert len(journal.incidents(driver.history)) == 1


def test_a_member_fails_while_newcomers_are_taken_in() -> None:
    """A fault of a member while new nodes join is an ordinary fault."""
    driver = grown()
    driver.exits(5, signal=SIGKILL)
    assert driver.last(journal.Decided).strategy is Strategy.RECOVER_IN_PLACE


def test_the_world_grows_once_a_step_at_most() -> None:
    """Nodes that arrive one after the other join in one regroup, so training pauses only once."""
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
    assert not driver.sent_by_node(p.PauseRequest)


def test_nobody_is_taken_in_when_the_first_are_done() -> None:
    """When the first ranks have ended, a returning node does not interrupt training."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    driver.exits(0, code=0)
    come_back(driver)
    assert not driver.sent_by_node(p.PauseRequest)
    for rank in (1, 4, 5):
        driver.exits(rank, code=0)
    assert driver.outcome is True


def test_a_returning_node_that_never_arrives() -> None:
    """A returning node that does not arrive in time leaves the job."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.hello(1)
    driver.spawned()
    driver.fire("come")
    assert "did not reach their Session" in driver.last(journal.NodeLeft).reason
    assert driver.phase is Phase.TRAINING


def test_a_node_that_comes_while_too_few_are_left() -> None:
    """The job continues as soon as enough nodes are present, whether they are new or old."""
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
    """When the connection of a dismissed node closes, the job drops its entry."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    line = driver.hello(1)
    driver.spawned()
    driver.raises(2)
    assert driver.machine.job.sent_home == {line}
    driver.lose_spare(line)
    assert driver.machine.job.sent_home == set()


def test_a_coming_rank_ends_when_the_job_does() -> None:
    """A rank of a returning node does not delay the end of the job and adds no later event."""
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
