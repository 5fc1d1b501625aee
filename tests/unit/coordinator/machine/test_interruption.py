"""Ranks that ended without an incident: the next ones open it, so each lost step is reported."""

from __future__ import annotations

from jobs.driver import Driver
from jobs.trained import trained, untouched

from rekindle.coordinator.machine.inheritance import earlier
from rekindle.coordinator.machine.machine import Machine
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.tables import shipped_tables
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.states import StateId


def lose_everything(job: Driver) -> None:
    """End the coordinator and all agents, as a machine that starts again does."""
    job.lose_coordinator()
    job.pids.clear()


def next_attempt(job: Driver) -> Driver:
    """Return the next attempt of a job whose attempt has ended. It has the same journal."""
    found = Driver(attempt=1)
    found.machine = Machine(
        job.machine.job.spec, shipped_tables, attempt=1, earlier=earlier(job.history)
    )
    found.history = [*job.history, *found.history]
    found.machine.takeover.start()
    found.collect()
    return found


def test_the_loss_of_coordinator_and_agents_is_an_incident() -> None:
    """New ranks begin at an earlier step. The incident has no number of lost steps.

    It uses no budget, and is closed with the first step.
    """
    job = trained(9)
    before, job.now = job.now, job.now + 70
    lose_everything(job)
    job.start()
    job.form(None)
    job.step(1)
    (incident,) = journal.incidents(job.history)
    assert incident.cause.kind is FaultKind.COORDINATOR
    assert "all agents of the job ended, after step 9 or later" in incident.cause.message
    assert (incident.closed, incident.resumed_at, incident.steps_lost) == (True, 0, None)
    assert incident.detected == before
    assert not job.recorded(journal.Decided)


def test_a_script_without_a_session_reports_the_loss_too() -> None:
    """Its incident is closed when all ranks run again."""
    job = untouched(Policy(strategies=(Strategy.RESTART,), max_restarts=1))
    lose_everything(job)
    job.start()
    (incident,) = journal.incidents(job.history)
    assert incident.closed
    assert incident.steps_lost is None


def test_ranks_that_live_on_are_no_loss() -> None:
    """Only the coordinator's own incident is in the journal."""
    job = trained(9)
    generation = job.machine.job.generation
    pids = dict(job.pids)
    job.lose_coordinator()
    live = tuple(p.LiveRank(rank=rank, pid=pids[rank], training=True) for rank in job.ranks)
    job.hello(0, generation=generation, ranks=live)
    assert len(journal.incidents(job.history)) == 1
    assert "a new coordinator replaced it" in job.last(journal.FaultSeen).fault.message


def test_an_attempt_that_was_stopped_before_its_last_steps_were_saved() -> None:
    """The next attempt opens an incident with the number of steps that it repeats."""
    job = trained(9, policy=Policy(strategies=()))
    job.stop()
    job.killed()
    assert job.last(journal.Ended).finished == 9
    again = next_attempt(job)
    again.hello(checkpoints=(StateId(4, 1),))
    again.store_up()
    again.spawned()
    again.form(None)
    again.step(5)
    (incident,) = journal.incidents(again.history)
    assert (incident.resumed_at, incident.steps_lost) == (4, 5)
    assert "the earlier attempt ended" in incident.cause.message


def test_an_attempt_whose_last_step_was_saved_is_no_incident() -> None:
    """The next attempt continues with the next step."""
    job = trained(9, policy=Policy(strategies=()))
    job.stop()
    job.killed()
    again = next_attempt(job)
    again.hello(checkpoints=(StateId(9, 1),))
    again.store_up()
    again.spawned()
    again.form(None)
    again.step(10)
    assert not journal.incidents(again.history)
