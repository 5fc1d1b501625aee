"""Losses while the ranks do not train: before they have met, and after the last step.

One job meets all of them. No restart of the policy is left, so each loss would end the job if it
counted as one in training.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import acts
import psutil
import pytest
from training_jobs.baselines import Baselines
from training_jobs.checks import assert_same_training
from training_jobs.injection import Fault
from training_jobs.job import STEPS, Job
from training_jobs.processes import dead, leads_session
from waiting import bound_s, wait_until

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy

RANKS = 4  # on two nodes
LIVES = {0: 4, 1: 5, 2: 5, 3: 4}  # processes of each rank that wait at the start of the script


class Start:
    """A job whose ranks wait at the start of the script, and again at its end."""

    def __init__(self, folder: Path) -> None:
        starts = [
            Fault(rank, "start", life=life, do="pause")
            for rank in range(RANKS)
            for life in range(1, LIVES[rank] + 1)
        ]
        all_end = [Fault(rank, "end", life=0, do="pause") for rank in range(RANKS)]
        two_end = [Fault(rank, "end", life=0, do="pause") for rank in (0, 1)]
        self.numbers = {(f.rank, f.life): number for number, f in enumerate(starts)}
        self.all_end = range(len(starts), len(starts) + RANKS)
        self.two_end = range(self.all_end.stop, self.all_end.stop + 2)
        policy = Policy(hang_timeout_s=bound_s(2.0))
        faults = [*starts, *all_end, *two_end]
        self.job = Job(folder, *faults, nodes=2, processes=RANKS, policy=policy)
        self.lives = dict.fromkeys(range(RANKS), 1)
        self.decided = 0  # decisions so far

    def until_started(self, *ranks: int) -> None:
        """Wait until the newest processes of these ranks wait at the start of the script."""
        for rank in ranks:
            self.job.wait_fault(self.numbers[rank, self.lives[rank]])

    def until_again(self, *ranks: int) -> None:
        """Wait until the next processes of these ranks wait at the start of the script."""
        for rank in ranks:
            self.lives[rank] += 1
        self.until_started(*ranks)

    def release(self, *ranks: int) -> None:
        """Let these ranks continue from the start of the script."""
        for rank in ranks:
            self.job.release(self.numbers[rank, self.lives[rank]])

    def check(self, strategy: Strategy, kind: FaultKind, *, apart: bool = False) -> None:
        """Check that one decision was made since the last check."""
        found = self.job.events_of(journal.Decided)[self.decided :]
        self.decided += len(found)
        (decided,) = found
        assert (decided.strategy, decided.fault.kind, decided.apart) == (strategy, kind, apart)

    def stop(self, pid: int) -> None:
        """Stop a process, and wait until it has stopped."""
        os.kill(pid, signal.SIGSTOP)
        stopped = psutil.STATUS_STOPPED
        wait_until(lambda: psutil.Process(pid).status() == stopped, f"process {pid} stopped")

    def fork_server(self, agent: int) -> psutil.Process:
        """Return the fork server of an agent; wait until it runs its program."""

        def found() -> psutil.Process | None:
            for child in psutil.Process(agent).children():
                with contextlib.suppress(psutil.Error):  # it has ended
                    program = any("fork_server_process" in word for word in child.cmdline())
                    if program and not leads_session(child):  # a rank has the same command line
                        return child
            return None

        return self.job.wait(found, "a fork server")


def a_fork_server_is_killed_while_it_imports(start: Start) -> None:
    """The agent starts another fork server, also for the second time."""
    engine = start.job.engine
    assert engine is not None
    for _ in range(2):
        server = start.fork_server(engine.agents[0].pid)
        server.kill()
        start.job.wait(lambda server=server: dead(server), "the end of a fork server")
    start.until_started(*range(RANKS))
    assert not start.job.events_of(journal.FaultSeen)


def a_rank_is_killed_before_any_rank_has_a_session(start: Start) -> None:
    """All ranks restart."""
    start.job.kill(3)
    start.until_again(*range(RANKS))
    start.check(Strategy.RESTART, FaultKind.PROCESS, apart=True)


def a_node_is_lost_before_any_rank_has_a_session(start: Start) -> None:
    """Another agent joins, and all ranks restart."""
    start.job.kill_node(0)
    start.until_again(*range(RANKS))
    start.check(Strategy.RESTART, FaultKind.NODE_LOST, apart=True)


def a_rank_is_killed_while_another_one_waits(start: Start) -> None:
    """Only this rank restarts."""
    start.release(0)
    start.job.wait(lambda: start.job.status().ranks[0].status == "waiting", "rank 0 in a Session")
    start.job.kill(2)
    start.until_again(2)
    start.check(Strategy.RECOVER_IN_PLACE, FaultKind.PROCESS)


def a_node_is_lost_while_a_rank_waits(start: Start) -> None:
    """Another agent joins, and starts the ranks of the node."""
    start.job.kill_node(1)
    start.until_again(2, 3)
    start.check(Strategy.RECOVER, FaultKind.NODE_LOST)


def a_rank_is_stopped_at_the_start_of_the_script(start: Start) -> None:
    """The agent sees the state of the process, and the rank restarts."""
    start.stop(start.job.pid(1))
    start.until_again(1)
    start.check(Strategy.RECOVER_IN_PLACE, FaultKind.HANG)


def the_fork_server_is_stopped_when_a_rank_must_start(start: Start) -> None:
    """The agent ends it, and another one forks the rank."""
    server = start.fork_server(start.job.agent_pid(0))
    start.stop(server.pid)
    start.job.kill(1)
    start.until_again(1)
    start.check(Strategy.RECOVER_IN_PLACE, FaultKind.PROCESS)
    assert dead(server)


def a_rank_is_stopped_while_it_waits_in_its_session(start: Start) -> None:
    """It restarts as well, before any other rank needs it."""
    start.stop(start.job.pid(0))
    start.until_again(0)
    start.check(Strategy.RECOVER_IN_PLACE, FaultKind.HANG)


def a_rank_is_killed_after_the_last_step(start: Start) -> None:
    """All ranks restart from the newest state, and do the rest of the script again."""
    start.release(*range(RANKS))
    for number in start.all_end:
        start.job.wait_fault(number)
    start.job.kill(1)
    for number in start.two_end:
        start.job.wait_fault(number)
    start.check(Strategy.RESTART, FaultKind.PROCESS, apart=True)


def a_node_is_lost_whose_ranks_have_ended(start: Start) -> None:
    """The job succeeds when the other ranks end."""
    job = start.job
    statuses = lambda: [rank.status for rank in job.status().ranks]  # noqa: E731
    job.wait(lambda: statuses()[2:] == ["exited"] * 2, "the end of the ranks of node 1")
    job.kill_node(1)
    job.wait_event(journal.NodeLeft, node=1)
    for number in start.two_end:
        job.release(number)
    assert job.end().outcome == "succeeded"
    assert len(job.events_of(journal.Decided)) == start.decided
    assert all(incident.closed for incident in job.incidents())


ACTS = [
    a_fork_server_is_killed_while_it_imports,
    a_rank_is_killed_before_any_rank_has_a_session,
    a_node_is_lost_before_any_rank_has_a_session,
    a_rank_is_killed_while_another_one_waits,
    a_node_is_lost_while_a_rank_waits,
    a_rank_is_stopped_at_the_start_of_the_script,
    the_fork_server_is_stopped_when_a_rank_must_start,
    a_rank_is_stopped_while_it_waits_in_its_session,
    a_rank_is_killed_after_the_last_step,
    a_node_is_lost_whose_ranks_have_ended,
]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[acts.Played, Job]]:
    """Run the job once, and let it meet all losses in turn."""
    start = Start(tmp_path_factory.mktemp("start"))
    with start.job:
        yield acts.Played(ACTS, start), start.job


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_a_loss(started: tuple[acts.Played, Job], act: str) -> None:
    """Each act has the result that its function states."""
    played, _ = started
    played.check(act)


def test_the_training_is_that_of_an_undisturbed_job(
    started: tuple[acts.Played, Job], baseline_of: Baselines
) -> None:
    """Losses outside of training change no result, and leave no process."""
    played, job = started
    played.check(acts.names(ACTS)[-1])
    assert_same_training(job.record, baseline_of("ddp", RANKS, STEPS))
    assert job.leftovers() == []
