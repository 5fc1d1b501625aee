"""The end of a job: errors of the script, scripts without a Session, stop."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import SIGKILL, sources, strategies, trained

from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Policy, Strategy

# ---- errors of the script


def test_an_exception_of_the_script_fails_the_job() -> None:
    """Without a restart budget, an error of the script ends all ranks and is the job's reason."""
    job = trained(5, processes=3)
    job.raises(1, "ZeroDivisionError: division by zero")
    assert job.phase is Phase.STOPPING
    order = job.sent_by_node(p.Kill)[0]
    assert (sorted(order.ranks), order.last) == ([0, 2], True)
    job.killed()
    assert job.outcome is False
    assert "ZeroDivisionError" in job.last(journal.Ended).reason
    assert job.sent_by_node(p.EndAgent) == {0: p.EndAgent(status=1)}


def test_the_first_failing_rank_by_time_is_the_reason() -> None:
    """If ranks raise almost together, the earliest error is the reason, in any order of arrival."""
    job = trained(5, processes=3)
    job.raises(2, "ConnectionError: peer", at=1001.5)
    job.raises(0, "KeyError: 'first'", at=1000.5)
    job.raises(1, "ConnectionError: peer", at=1001.0)
    assert job.outcome is False
    assert "rank 0 raised KeyError: 'first'" in job.last(journal.Ended).reason
    [incident] = journal.incidents(job.history)
    assert incident.cause.rank == 0
    assert incident.cause.traceback


def test_the_error_of_one_rank_outweighs_the_broken_links_of_the_others() -> None:
    """The script's error is the cause, even if peers first report a broken link."""
    job = trained(5, processes=3)
    job.fail_step(0)
    job.fail_step(2)
    job.raises(1, "ValueError: bad batch")
    job.killed()
    assert "ValueError: bad batch" in job.last(journal.Ended).reason


def test_restarts_are_counted() -> None:
    """Each error of the script uses one restart. With no restart left, the job fails."""
    job = trained(5, policy=Policy(max_restarts=2))
    for number in (1, 2):
        job.raises(0, f"ValueError: try {number}")
        assert job.phase is Phase.RESTARTING
        job.killed()
        assert job.sent_by_node(p.HostStore)[0].serial == number + 1
        job.store_up()
        assert {spawn.restart for spawn in job.sent_by_node(p.Spawn).values()} == {number}
        assert job.spawned_now() == [0, 1]
        job.spawned()
        job.form()
        job.step(6 + number)
    job.raises(0, "ValueError: try 3")
    assert job.phase is Phase.STOPPING
    assert strategies(job) == [Strategy.RESTART, Strategy.RESTART, Strategy.FAIL]
    assert "2 of 2 restarts are used" in job.last(journal.Decided).reason


def test_the_same_error_after_a_restart_fails_the_job() -> None:
    """The same error of the same rank at the same step again fails the job.

    A restart cannot help.
    """
    job = trained(5, policy=Policy(max_restarts=5))
    for _ in range(2):
        job.raises(0, "ValueError: always")
        job.killed()
        if job.phase is Phase.GATHERING:
            job.store_up()
            job.spawned()
    assert strategies(job) == [Strategy.RESTART, Strategy.FAIL]
    assert job.outcome is False
    assert "the script is the likely cause" in job.last(journal.Decided).reason


def test_a_fault_during_a_restart_does_not_take_another() -> None:
    """A rank that is killed while a restart ends all ranks has ended. The restart continues."""
    job = trained(5, processes=3, policy=Policy(max_restarts=1))
    job.raises(0)
    job.exits(1, signal=SIGKILL)
    job.exits(2, signal=SIGKILL)
    assert job.phase is Phase.GATHERING
    assert strategies(job) == [Strategy.RESTART]


def test_a_node_is_lost_during_a_restart() -> None:
    """A restart waits for the replacement of a lost node, then starts all ranks."""
    job = trained(5, nodes=2, processes=1, policy=Policy(max_restarts=1))
    job.raises(0)
    job.lose(1)
    assert job.phase is Phase.GATHERING
    job.store_up()
    assert not job.spawned_now()
    job.hello(1)
    assert job.spawned_now() == [0, 1]


def test_the_time_limit_for_a_node_passes_during_a_restart() -> None:
    """If a node does not arrive in time, the job ends, also if the limit ends during a restart."""
    job = trained(5, nodes=3, processes=1, policy=Policy(max_restarts=1))
    job.raises(0)
    job.lose(1)
    job.fire("node")
    job.killed()
    if job.phase is not Phase.ENDED:
        assert "node" in job.timers, "nobody waits for the node any more"
        job.fire("node")
    job.killed()
    assert job.outcome is False


def test_a_rank_that_cannot_be_started_fails_the_job() -> None:
    """A rank that cannot start fails the job without a restart, which would fail the same way."""
    job = Driver(processes=2, policy=Policy(max_restarts=3))
    job.hello(0)
    job.store_up()
    job.fail_to_start([0])
    job.killed()
    assert job.outcome is False
    assert "cannot fork" in job.last(journal.Ended).reason


def test_ranks_that_cannot_be_started_do_not_keep_a_job_from_stopping() -> None:
    """A rank whose start fails during a stop counts as ended."""
    job = Driver(processes=2)
    job.hello(0)
    job.store_up()
    job.stop()
    job.fail_to_start([0, 1])
    assert job.outcome is False
    assert job.last(journal.Ended).outcome == "stopped"


# ---- scripts without a Session


def test_an_untouched_script_runs_to_its_end() -> None:
    """If all ranks of a script without a Session exit with status 0, the job succeeds."""
    job = Driver(nodes=2, processes=1)
    job.start()
    job.exits(0, code=0)
    assert job.outcome is None
    job.exits(1, code=0)
    assert job.outcome is True
    assert job.sent_by_node(p.EndAgent) == {0: p.EndAgent(status=0), 1: p.EndAgent(status=0)}
    assert not journal.incidents(job.history)


def test_an_untouched_script_is_restarted_as_a_whole() -> None:
    """If one rank is killed, all ranks restart, including a rank that exited with status 0."""
    job = Driver(processes=3, policy=Policy(max_restarts=1))
    job.start()
    job.exits(2, code=0)
    job.exits(0, signal=SIGKILL)
    assert sorted(job.sent_by_node(p.Kill)[0].ranks) == [1]
    job.killed()
    job.store_up()
    assert job.spawned_now() == [0, 1, 2]
    job.spawned()
    [incident] = journal.incidents(job.history)
    assert incident.closed
    assert incident.strategy is Strategy.RESTART
    for rank in job.ranks:
        job.exits(rank, code=0)
    assert job.outcome is True


def test_an_untouched_script_that_ends_at_once_after_its_restart() -> None:
    """The incident closes when the last rank starts, even if other ranks have already ended."""
    job = Driver(nodes=2, processes=1, policy=Policy(max_restarts=1))
    job.start()
    job.raises(1)
    job.killed()
    job.store_up()
    spawns, job.unstarted = job.unstarted, []
    for node, spawn in spawns:
        job.unstarted = [(node, spawn)]
        job.spawned()
        job.exits(node, code=0)
    assert job.outcome is True
    (incident,) = journal.incidents(job.history)
    assert incident.closed


def test_an_untouched_script_is_never_late() -> None:
    """The time limit to reach a Session does not apply to a script without a Session."""
    job = Driver()
    job.start()
    job.fire("join")
    assert not job.commands
    assert job.phase is Phase.REGROUPING


def test_a_lost_node_of_an_untouched_script_without_restarts_ends_the_job() -> None:
    """If a node is lost and no restart is allowed, the job fails and requests no other node."""
    job = Driver(nodes=2, processes=1)
    job.start()
    job.lose(1)
    assert job.phase is Phase.STOPPING
    assert not job.recorded(journal.NodeWanted), "an agent is asked for that nobody needs"
    job.killed()
    assert job.outcome is False
    assert "node 1" in job.last(journal.Ended).reason


# ---- the end


def test_ranks_are_dismissed_when_all_are_done() -> None:
    """When all ranks have finished all steps, the job dismisses them.

    It succeeds when they exit.
    """
    job = trained(9)
    job.arrive([0], finished=10, done=True)
    assert not job.sent_by_node(p.EndSession)
    job.arrive([1], finished=10, done=True)
    assert job.sent_by_node(p.EndSession) == {0: p.EndSession(finished=10)}
    for rank in job.ranks:
        job.exits(rank, code=0, finished=10)
    assert job.outcome is True
    assert job.last(journal.Ended).finished == 10


def test_a_rank_dies_when_others_are_done_already() -> None:
    """Ranks that wait at the end give their state to a replaced rank.

    The job then dismisses all.
    """
    job = trained(9, processes=3)
    job.arrive([0, 1], finished=10, done=True)
    job.exits(2, signal=SIGKILL, finished=9)
    assert job.spawned_now() == [2]
    job.spawned()
    job.arrive([2])
    assert sources(job) == {0: StateSource.SELF, 1: StateSource.SELF, 2: StateSource.PEER}
    assert job.last(journal.Formed).step == 10
    job.ready(job.ranks)
    job.arrive(job.ranks, finished=10, done=True)
    assert job.sent_by_node(p.EndSession)
    assert all(incident.closed for incident in journal.incidents(job.history))


def test_a_second_loop_of_steps_forms_again_after_the_dismissal() -> None:
    """After the dismissal, a script may open another Session. The ranks form a generation again."""
    job = trained(9)
    job.arrive(job.ranks, finished=10, done=True)
    job.arrive(job.ranks)
    assert job.sent_by_node(p.FormGeneration)[0].generation == 2


def test_a_rank_that_ends_well_too_early_is_the_scripts_error() -> None:
    """If a rank exits with status 0 while others train, it causes their broken collective."""
    job = trained(5, processes=3)
    job.exits(0, code=0, finished=5)
    assert job.phase is Phase.TRAINING
    job.fail_step(1)
    assert job.phase is Phase.STOPPING
    job.killed()
    assert job.outcome is False
    assert "rank 0 ended with exit status 0 before" in job.last(journal.Ended).reason


def test_a_rank_that_ends_well_while_others_wait_at_the_end() -> None:
    """If a rank exits with status 0 and all others wait at the end, the job fails."""
    job = trained(9, processes=3)
    job.exits(0, code=0, finished=10)
    job.arrive([1, 2], finished=10, done=True)
    job.killed()
    assert job.outcome is False
    assert "rank 0 ended with exit status 0 before" in job.last(journal.Ended).reason


def test_a_rank_that_ends_well_after_the_others_wait_at_the_end() -> None:
    """The job also fails if the others already wait at the end when the rank exits."""
    job = trained(9, processes=3)
    job.arrive([1, 2], finished=10, done=True)
    job.exits(0, code=0, finished=10)
    job.killed()
    assert job.outcome is False


def test_a_rank_without_a_session_ends_while_its_peers_wait_at_theirs() -> None:
    """If only some ranks open a Session, the job fails and names the rank that ended early."""
    job = Driver(processes=2)
    job.start()
    job.arrive([0])
    job.exits(1, code=0)
    job.killed()
    assert job.outcome is False
    assert "rank 1 ended with exit status 0 before" in job.last(journal.Ended).reason


def test_a_rank_that_ends_well_while_its_peers_regroup() -> None:
    """A rank that exits with status 0 instead of arriving is an error of the script."""
    job = trained(5, processes=3)
    job.exits(2, signal=SIGKILL, finished=5)
    job.exits(0, code=0, finished=5)
    assert job.phase is Phase.STOPPING
    job.killed()
    assert job.outcome is False


# ---- stop


def test_stop_lets_the_ranks_end_in_peace() -> None:
    """A stop sends SIGTERM with grace to all ranks. The job ends when the last rank has ended."""
    job = trained(5, nodes=2, processes=1)
    job.stop()
    assert {kill.grace_s > 0 for kill in job.sent_by_node(p.Kill).values()} == {True}
    job.exits(0, code=0)
    assert job.outcome is None
    job.exits(1, signal=15)
    assert job.outcome is False
    assert job.last(journal.Ended).outcome == "stopped"
    assert not journal.incidents(job.history)


def test_stop_twice_kills_at_once() -> None:
    """A repeated stop does nothing. An immediate stop kills the ranks without grace."""
    job = trained(5)
    job.stop()
    job.stop()
    assert not job.commands
    job.stop(at_once=True)
    assert job.sent_by_node(p.Kill)[0].grace_s == 0
    job.killed()
    assert job.last(journal.Ended).outcome == "stopped"


@pytest.mark.parametrize("reached", ["nothing", "nodes", "store", "spawning", "regrouping"])
def test_stop_at_any_moment_of_the_start(reached: str) -> None:
    """A stop during the start ends all processes that have started, and then the job."""
    job = Driver()
    if reached != "nothing":
        job.hello(0)
    if reached in ("store", "spawning", "regrouping"):
        job.store_up()
    if reached == "regrouping":
        job.spawned()
    job.stop()
    job.killed()
    assert job.outcome is False
    assert job.last(journal.Ended).outcome == "stopped"


def test_stop_during_a_restart() -> None:
    """After a stop during a restart, no rank starts."""
    job = trained(5, policy=Policy(max_restarts=1))
    job.raises(0)
    job.stop()
    job.killed()
    assert job.last(journal.Ended).outcome == "stopped"
    assert not job.unstarted


def test_a_node_lost_while_stopping_has_ended() -> None:
    """A stop does not wait for the ranks of a lost agent."""
    job = trained(5, nodes=2, processes=1)
    job.stop()
    job.lose(1)
    job.exits(0, signal=15)
    assert job.outcome is False
    assert not job.recorded(journal.NodeWanted)


def test_links_that_a_restart_has_answered_are_not_decided_about_again() -> None:
    """New processes form a generation, so the broken links of old ones use no second restart."""
    job = trained(5, policy=Policy(max_restarts=1, max_in_row=1))
    for _ in range(2):
        job.fail_step(1)
        job.arrive([0, 1], finished=5)
    assert strategies(job) == [Strategy.RETRY, Strategy.RESTART]
    job.killed()
    job.store_up()
    job.spawned()
    job.arrive([0, 1])
    assert strategies(job) == [Strategy.RETRY, Strategy.RESTART]
    assert job.last(journal.Formed).generation == 3


def test_an_agent_comes_with_ended_ranks_while_all_are_restarted() -> None:
    """An agent that joins with ended ranks during a restart starts them with all others."""
    job = Driver(nodes=3, processes=1, policy=Policy(max_restarts=2))
    job.start()  # a script without a Session
    job.exits(0, code=0)
    job.raises(1)
    job.lose(0)
    assert job.phase is Phase.RESTARTING
    job.hello(0, ended=(0,))
    assert job.phase is Phase.RESTARTING
    job.killed()
    job.store_up()
    assert job.spawned_now() == [0, 1, 2]
    assert job.machine.job.restarts == 1


def test_the_last_checkpoint_is_written_while_all_are_restarted() -> None:
    """The job succeeds after its last checkpoint.

    All its ranks had already exited with status 0.
    """
    job = Driver(nodes=3, processes=1, least=2, policy=Policy(max_restarts=2))
    for node in (0, 1):
        job.hello(node)
    job.fire("late")
    job.store_up()
    job.spawned()
    job.arrive([0, 1])
    job.ready([0, 1])
    job.step_of([0, 1], 1)
    job.hello(2)
    job.spawned()
    job.machine.job.roster.nodes[0].committing = 1
    job.exits(0, code=0)
    job.exits(1, code=0)
    job.machine.recovery.report(Fault(kind=FaultKind.PROCESS, message="a broken device", node=0))
    job.collect()
    assert job.phase is Phase.RESTARTING
    job.say(0, p.CheckpointWritten(step=1, generation=1, path="there"))
    assert job.phase is Phase.ENDED
    assert job.outcome is True
