"""A coordinator that takes over knows the decisions, their causes, and the unfinished actions."""

from __future__ import annotations

import msgspec
import pytest
from jobs.driver import Driver
from jobs.trained import SIGKILL, strategies, take_over, trained

from rekindle.coordinator.machine.inheritance import earlier
from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.recovery.policy.policy import ALLOWABLE, INNER, Policy, Strategy

PLACED_ANEW = Policy(
    strategies=tuple(s for s in ALLOWABLE if s not in INNER), max_reschedules=2, max_restarts=0
)


def report(job: Driver, what: str, *, node: int = 0, device: int = 1, **more: object) -> None:
    """Report a fault code of a device."""
    event = HealthEvent(source=EventSource.ASCEND, what=what, node=node, device=device, **more)
    assert job.machine.health.on_health_event(event, job.now) == ""
    job.collect()


def answer(job: Driver, granted: bool) -> None:
    """Let a person answer the request that waits."""
    approval = p.Approval(incident=job.machine.job.incidents.open, granted=granted, by="ann")
    assert job.machine.recovery.approve(approval) == ""
    job.collect()


def end(job: Driver) -> str:
    """Let the agent meet another coordinator, which refuses it. Return how the attempt ends."""
    take_over(job, dead=(1,))
    job.fire("late")
    return job.last(journal.Ended).outcome


# ---- the outcome of the attempt


def test_a_job_that_is_being_placed_anew_goes_on_to_be() -> None:
    """After a decision to reschedule the job, a new coordinator ends the attempt as rescheduled."""
    job = trained(5, policy=PLACED_ANEW)
    job.exits(1, code=3)
    assert strategies(job) == [Strategy.RESCHEDULE_JOB]
    assert end(job) == "rescheduled"


def test_what_was_refused_is_not_done_after_all() -> None:
    """If a person refused the reschedule, a new coordinator ends the attempt as failed."""
    asks = msgspec.structs.replace(PLACED_ANEW, approve=(Strategy.RESCHEDULE_JOB,))
    job = trained(5, policy=asks)
    job.exits(1, code=3)
    answer(job, granted=False)
    assert job.phase is Phase.STOPPING
    assert end(job) == "failed"


@pytest.mark.parametrize("when", ["while it waits", "during the reschedule"])
def test_a_job_that_a_person_has_stopped_stays_so(when: str) -> None:
    """A job that a person stopped ends as stopped, whatever the decision before was."""
    waits = when == "while it waits"
    asks = (Strategy.RESCHEDULE_JOB,) if waits else ()
    job = trained(5, policy=msgspec.structs.replace(PLACED_ANEW, approve=asks))
    job.exits(1, code=3)
    assert (job.machine.job.phase is Phase.STOPPING) is not waits
    job.stop()
    assert end(job) == "stopped"


def test_the_second_stop_during_final_checkpoint_is_one_too() -> None:
    """A second stop during the final checkpoint ends the job as stopped, without a new attempt."""
    job = trained(12, policy=PLACED_ANEW)
    job.say(0, p.Snapshots(kept=dict.fromkeys(job.ranks, ((10, 1),))))
    job.exits(1, code=3)
    job.killed()
    assert job.phase is Phase.FINAL_CHECKPOINT
    job.stop(at_once=True)
    assert job.last(journal.Ended).outcome == "stopped"


# ---- decisions and their causes


def sick(job: Driver, node: int) -> None:
    """Report that the pod of a node has the reason NodeLost."""
    event = HealthEvent(source=EventSource.POD_REASON, what="NodeLost", node=node)
    assert job.machine.health.on_health_event(event, job.now) == ""
    job.collect()


def test_the_fault_that_waits_for_a_person_is_the_one_that_was_asked_about() -> None:
    """After a takeover, an approval still applies to the fault that it was requested for.

    Three nodes fail: a person approves the first, is asked about the second, and the third waits.
    """
    job = trained(5, nodes=4, processes=1, policy=Policy(approve=(Strategy.RECOVER,)))
    for node in (1, 2, 3):
        sick(job, node)
    answer(job, granted=True)
    before = job.machine.job
    assert [past.fault.node for past in before.incidents.past] == [1, 2]
    take_over(job, dead=(1,))
    assert [past.fault.node for past in job.machine.job.incidents.past[:2]] == [1, 2]
    answer(job, granted=True)
    assert 2 in {left.node for left in job.recorded(journal.NodeLeft)}
    assert job.machine.job.incidents.past[-1].fault.node == 3
    assert job.last(journal.Decided).approval


def test_the_cause_that_was_decided_about_is_not_the_last_that_was_seen() -> None:
    """The inherited cause is the fault that was decided about, not the last fault.

    Two ranks report a broken link, and one of them dies.
    """
    job = trained(5, processes=3)
    job.fail_step(2)
    job.raises(0, "RuntimeError: [gloo] Connection closed by peer", at=job.now + 1)
    job.arrive([1, 2], finished=5)
    job.spawned()
    job.arrive([0])
    past = job.machine.job.incidents.past
    assert [(each.strategy, each.fault.rank) for each in past] == [
        (Strategy.RECOVER_IN_PLACE, 0),
        (Strategy.RETRY, 2),
    ]
    assert list(earlier(job.history).past) == past


def test_a_lighter_decision_counts_and_does_not_change_what_is_shown() -> None:
    """A lighter decision uses its budget, also after a takeover. Users see the heavier decision."""
    from rekindle.tasks.supervise import incident_steps  # it imports Prefect

    job = trained(5)
    job.exits(0, signal=SIGKILL, finished=5)
    job.fail_step(1, kind=FaultKind.TRANSIENT)
    decided = job.last(journal.Decided)
    assert (decided.strategy, decided.outweighed) == (Strategy.RETRY, True)
    (incident,) = journal.incidents(job.history)
    assert incident_steps(decided, incident) == ()
    assert incident.strategies == [Strategy.RECOVER_IN_PLACE]
    assert "SIGKILL" in incident.reason
    past = job.machine.job.incidents.past
    job.lose_coordinator()
    assert job.machine.job.incidents.past == past
    assert [each.strategy for each in past] == [Strategy.RECOVER_IN_PLACE, Strategy.RETRY]


def test_an_attempt_that_a_person_begins_has_budgets_of_its_own() -> None:
    """Decisions of a failed attempt do not count in an attempt that a person starts.

    The next attempt does not need to be in the journal yet.
    """
    job = trained(5, policy=Policy(max_restarts=1))
    job.exits(0, code=3, finished=5)
    assert earlier(job.history).past
    failed = journal.Ended(outcome="failed", reason="no restart is left", finished=5)
    assert earlier([*job.history, failed]).past == ()
    again = journal.Ended(outcome=RESCHEDULED, reason="node 1 is sick", finished=5)
    assert earlier([*job.history, again]).past == earlier(job.history).past


# ---- unfinished actions


def test_the_store_of_an_earlier_coordinator_is_no_answer() -> None:
    """A new coordinator waits for its own store, and ignores one that the old one requested.

    The agent ends the old store when it reads the new order.
    """
    job = Driver(nodes=1, processes=2)
    job.hello(0)
    ((_, first),) = job.stores
    job.lose_coordinator()
    job.hello(0)
    job.say(0, p.StoreUp(serial=first.serial, port=11111))
    assert not job.unstarted
    job.store_up(22222)
    ((_, spawn),) = job.unstarted
    assert spawn.store_port == 22222


def test_an_inspection_for_an_earlier_coordinator_is_no_answer() -> None:
    """A new coordinator ignores the results of an inspection that the old one ordered."""
    job = trained(5)
    job.say(0, p.RankStalled(rank=0, generation=1))
    first = job.sent_by_node(p.InspectRanks)[0]
    take_over(job)
    job.arrive(job.ranks, 5)
    job.store_up()
    job.ready(job.ranks)
    job.say(0, p.RankStalled(rank=0, generation=job.machine.job.generation))
    job.say(0, p.RanksInspected(serial=first.serial, looks=()))
    assert job.machine.job.inspection is not None


@pytest.mark.parametrize("asked", [False, True])
def test_a_device_is_reset_by_whoever_takes_over(asked: bool) -> None:
    """A new coordinator resets a device that the old one decided to reset, exactly once.

    The rank starts only together with the reset.
    """
    policy = Policy(approve=(Strategy.RECOVER_IN_PLACE,) if asked else ())
    job = trained(5, policy=policy)
    report(job, "80E18005")
    if asked:
        answer(job, granted=True)
    take_over(job, dead=(1,))
    job.arrive([0], finished=5)
    job.store_up()
    ((_, spawn),) = job.unstarted
    assert (spawn.ranks, spawn.reset) == ((1,), (1,))
    job.spawned()
    job.lose_coordinator()
    assert job.machine.fleet.to_reset == set()


def test_a_device_that_could_not_be_reset_is_not_reset_again() -> None:
    """If a reset fails, a new coordinator does not repeat it. Another node gets the rank."""
    job = trained(5, nodes=2)
    report(job, "80E18005", node=1)
    job.killed()
    job.unstarted.clear()
    job.say(1, p.DeviceResetFailed(rank=3, error="it does not answer"))
    job.lose_coordinator()
    assert job.machine.fleet.to_reset == set()


def test_memory_that_was_damaged_just_before_the_death_is_answered() -> None:
    """If a rank has not met the damaged memory before a takeover, its process is replaced."""
    job = trained(5)
    report(job, "80E01801")
    take_over(job)
    job.fire("health-events")
    assert strategies(job)[-1] is Strategy.RECOVER_IN_PLACE
    assert job.last(journal.FaultSeen).fault.code == "80E01801"
    assert job.machine.health.events_unmet == ()  # only once, however often the agent reconnects


def test_memory_of_a_process_that_has_ended_is_not_missed() -> None:
    """If the process with the damaged memory has ended, a new coordinator ignores the damage."""
    job = trained(5)
    report(job, "80E01801")
    job.exits(1, signal=SIGKILL, finished=5)
    job.spawned()
    take_over(job)
    job.fire("health-events")  # the code is still present, because no reset ended it
    assert strategies(job).count(Strategy.RECOVER_IN_PLACE) == 1


def test_a_code_that_stays_too_long_is_watched_by_the_next_coordinator() -> None:
    """A new coordinator watches a code that stays too long, and isolates the host only once."""
    job = trained(5)
    report(job, "81078603")
    take_over(job)
    assert "health-events" in job.timers
    job.fire("health-events")
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-1"]
    job.lose_coordinator()
    job.fire("health-events")
    assert len(job.recorded(journal.Isolated)) == 1


def test_a_process_of_the_same_number_on_another_attempt_is_another_placement() -> None:
    """The same process number in another attempt is another placement.

    Process numbers repeat, often in containers.
    """
    first = Driver(nodes=1, processes=1)
    first.hello(0, pid=7)
    again = journal.JobStarted(job_id="j", attempt=1, nodes=1, processes_per_node=1, pid=1)
    came = journal.NodeJoined(node=0, address="10.0.0.0", pid=7)
    assert len(earlier([*first.history, again, came]).placements[0]) == 2


# ---- consecutive losses of coordinators


def meet(job: Driver, finished: int) -> None:
    """Let all ranks arrive at the next coordinator. If it orders a store, form the generation."""
    job.arrive(job.ranks, finished)
    if job.stores:
        job.store_up()
        job.ready(job.ranks)


def test_steps_between_two_deaths_of_coordinators_end_the_row() -> None:
    """A job may lose any number of coordinators if it finishes a step after each."""
    job = trained(1)
    for finished in range(2, 9):
        take_over(job)
        meet(job, finished)
        job.step(finished + 1)
    assert strategies(job) == [Strategy.RETRY] * 7


def test_deaths_of_coordinators_without_a_step_between_are_a_row() -> None:
    """The policy limits the losses of coordinators without a step between them."""
    job = trained(5)
    for _ in range(4):
        take_over(job)
        meet(job, 5)
    assert strategies(job)[:3] == [Strategy.RETRY] * 3
    assert Strategy.RETRY not in strategies(job)[3:]
