"""Ranks with different texts of a file never train together."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import take_over, trained

from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy

OLD = {"/job/train.py": "0a", "/job/model.py": "1b"}
NEW = OLD | {"/job/train.py": "0c"}


def edited(job: Driver, *, rank: int = 1) -> None:
    """Replace a rank whose script has changed since the other ranks started."""
    job.exits(rank, signal=9)
    job.spawned()
    others = [each for each in job.ranks if each != rank]
    job.arrive(others, 5, sources=OLD)
    job.arrive([rank], sources=NEW)


def restarted(job: Driver) -> None:
    job.killed()
    job.store_up()
    job.spawned()


def test_all_ranks_restart_on_the_new_text() -> None:
    """A replacement with another text joins no generation: all ranks restart. The reason says why.

    The restart uses no restart of the policy.
    """
    job = trained(5, processes=3)
    edited(job)
    assert not job.sent(p.FormGeneration)
    assert job.phase is Phase.RESTARTING
    decided = job.last(journal.Decided)
    assert decided.strategy is Strategy.RESTART
    assert "rank 1 and rank 0 run different texts of /job/train.py" in decided.reason
    restarted(job)
    job.arrive(job.ranks, sources=NEW)
    job.ready(job.ranks)
    job.step(6)
    [incident] = journal.incidents(job.history)
    assert incident.closed
    assert incident.cause.kind is FaultKind.SOURCE
    edited(job)  # the next change is another incident
    assert job.phase is Phase.RESTARTING


def test_a_job_whose_policy_has_no_restart_ends() -> None:
    """Without the strategy `restart` a changed text ends the job, with the text as the reason."""
    policy = Policy(strategies=(Strategy.RECOVER_IN_PLACE, Strategy.RETRY))
    job = trained(5, processes=2, policy=policy)
    edited(job)
    job.killed()
    assert job.outcome is False
    assert "different texts of /job/train.py" in job.last(journal.Ended).reason


def test_nodes_with_different_files_fail_the_job() -> None:
    """If the texts differ also after a restart, a further restart does not help."""
    job = Driver(nodes=2, processes=1)
    job.start()
    for phase in (Phase.RESTARTING, Phase.STOPPING):
        job.arrive([0], sources=OLD)
        job.arrive([1], sources=NEW)
        assert not job.sent(p.FormGeneration)
        assert job.phase is phase
        if phase is Phase.RESTARTING:
            restarted(job)
    assert "differ also after a restart" in job.last(journal.Decided).reason


@pytest.mark.parametrize("more", [{}, {"/job/metrics.py": "2d"}])
def test_a_rank_may_load_more_modules(more: dict[str, str]) -> None:
    """Only the texts of a file that several ranks have loaded count."""
    job = Driver(processes=3)
    job.start()
    job.arrive([0], sources=OLD | more)
    job.arrive([1], sources=OLD)
    job.arrive([2], sources={})
    assert job.sent(p.FormGeneration)


def test_a_new_coordinator_compares_the_texts() -> None:
    """After a takeover the ranks report their texts again."""
    job = trained(5, processes=2)
    take_over(job)
    job.arrive([0], 5, sources=OLD)
    job.arrive([1], 5, sources=NEW)
    assert not job.sent(p.FormGeneration)
    assert job.last(journal.Decided).strategy is Strategy.RESTART


def test_the_rank_with_the_rare_text_is_named() -> None:
    """The fault names the rank whose text fewer ranks have."""
    job = Driver(processes=4)
    job.start()
    job.arrive([0], sources=NEW)
    job.arrive([1, 2, 3], sources=OLD)
    assert job.last(journal.FaultSeen).fault.rank == 0
