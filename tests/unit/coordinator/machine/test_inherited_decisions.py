"""A coordinator that takes over knows what was decided, about what, and what was left to do."""

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
from rekindle.tasks.supervise import incident_steps

PLACED_ANEW = Policy(
    strategies=tuple(s for s in ALLOWABLE if s not in INNER), max_reschedules=2, max_restarts=0
)


def report(job: Driver, what: str, *, node: int = 0, device: int = 1, **more: object) -> None:
    """Somebody reports a code of a device."""
    sign = HealthEvent(source=EventSource.ASCEND, what=what, node=node, device=device, **more)
    assert job.machine.health.on_sign(sign, job.now) == ""
    job.collect()


def answer(job: Driver, granted: bool) -> None:
    """A person answers what waits."""
    said = p.Approval(incident=job.machine.job.incidents.open, granted=granted, by="ann")
    assert job.machine.recovery.approve(said) == ""
    job.collect()


def end(job: Driver) -> str:
    """Its agent comes to another coordinator, which refuses it; return how the attempt ends."""
    take_over(job, dead=(1,))
    job.fire("late")
    return job.last(journal.Ended).outcome


# ---- how the attempt is to end


def test_a_job_that_is_being_placed_anew_goes_on_to_be() -> None:
    """Another attempt follows."""
    job = trained(5, policy=PLACED_ANEW)
    job.exits(1, code=3)
    assert strategies(job) == [Strategy.RESCHEDULE_JOB]
    assert end(job) == "rescheduled"


def test_what_was_refused_is_not_done_after_all() -> None:
    """The last that was decided is the reschedule that a person has not approved."""
    asks = msgspec.structs.replace(PLACED_ANEW, approve=(Strategy.RESCHEDULE_JOB,))
    job = trained(5, policy=asks)
    job.exits(1, code=3)
    answer(job, granted=False)
    assert job.phase is Phase.STOPPING
    assert end(job) == "failed"


@pytest.mark.parametrize("when", ["while it waits", "during the reschedule"])
def test_a_job_that_a_person_has_stopped_stays_so(when: str) -> None:
    """However it would have ended otherwise."""
    waits = when == "while it waits"
    asks = (Strategy.RESCHEDULE_JOB,) if waits else ()
    job = trained(5, policy=msgspec.structs.replace(PLACED_ANEW, approve=asks))
    job.exits(1, code=3)
    assert (job.machine.job.phase is Phase.STOPPING) is not waits
    job.stop()
    assert end(job) == "stopped"


def test_the_second_stop_during_final_checkpoint_is_one_too() -> None:
    """They are given up, and no attempt follows."""
    job = trained(12, policy=PLACED_ANEW)
    job.say(0, p.Snapshots(kept=dict.fromkeys(job.ranks, ((10, 1),))))
    job.exits(1, code=3)
    job.killed()
    assert job.phase is Phase.DUMPING
    job.stop(at_once=True)
    assert job.last(journal.Ended).outcome == "stopped"


# ---- what was decided, and about what


def sick(job: Driver, node: int) -> None:
    """A node is found to be sick."""
    sign = HealthEvent(source=EventSource.POD_REASON, what="NodeLost", node=node)
    assert job.machine.health.on_sign(sign, job.now) == ""
    job.collect()


def test_the_fault_that_waits_for_a_person_is_the_one_that_was_asked_about() -> None:
    """Of three sick nodes one is granted, one waits for an answer, one for the answer to that."""
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
    """Two ranks tell of a broken link, and one dies of it: the first was the cause."""
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
    """It uses up a budget, also after the coordinator's death; people see the heavier one."""
    job = trained(5)
    job.exits(0, signal=SIGKILL, finished=5)
    job.fail_step(1, kind=FaultKind.TRANSIENT)
    told = job.last(journal.Decided)
    assert (told.strategy, told.lighter) == (Strategy.RETRY, True)
    (incident,) = journal.incidents(job.history)
    assert incident_steps(told, incident) == ()
    assert incident.strategies == [Strategy.RECOVER_IN_PLACE]
    assert "SIGKILL" in incident.reason
    past = job.machine.job.incidents.past
    job.lose_coordinator()
    assert job.machine.job.incidents.past == past
    assert [each.strategy for each in past] == [Strategy.RECOVER_IN_PLACE, Strategy.RETRY]


def test_an_attempt_that_a_person_begins_has_budgets_of_its_own() -> None:
    """Decisions of an attempt that failed do not count, not even before the next one is noted."""
    job = trained(5, policy=Policy(max_restarts=1))
    job.exits(0, code=3, finished=5)
    assert earlier(job.history).past
    failed = journal.Ended(outcome="failed", reason="no restart is left", finished=5)
    assert earlier([*job.history, failed]).past == ()
    again = journal.Ended(outcome=RESCHEDULED, reason="node 1 is sick", finished=5)
    assert earlier([*job.history, again]).past == earlier(job.history).past


# ---- what was left to do


@pytest.mark.parametrize("asked", [False, True])
def test_a_device_is_reset_by_whoever_takes_over(asked: bool) -> None:
    """Its rank is not started without a reset, nor reset again when it was started."""
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
    """Its rank is placed on another node."""
    job = trained(5, nodes=2)
    report(job, "80E18005", node=1)
    job.killed()
    job.unstarted.clear()
    job.say(1, p.DeviceResetFailed(rank=3, error="it does not answer"))
    job.lose_coordinator()
    assert job.machine.fleet.to_reset == set()


def test_memory_that_was_damaged_just_before_the_death_is_answered() -> None:
    """No rank has met it, and the one that may still lives: its process is replaced."""
    job = trained(5)
    report(job, "80E01801")
    take_over(job)
    job.fire("signs")
    assert strategies(job)[-1] is Strategy.RECOVER_IN_PLACE
    assert job.last(journal.FaultSeen).fault.code == "80E01801"
    assert job.machine.health.signs_unmet == ()  # once, however often its agent comes


def test_memory_of_a_process_that_has_ended_is_not_missed() -> None:
    """It is what the process has died of, and a new one has no use of it."""
    job = trained(5)
    report(job, "80E01801")
    job.exits(1, signal=SIGKILL, finished=5)
    job.spawned()
    take_over(job)
    assert "signs" not in job.timers
    assert strategies(job).count(Strategy.RECOVER_IN_PLACE) == 1


def test_a_code_that_stays_too_long_is_watched_by_the_next_coordinator() -> None:
    """And answered once, however many there are."""
    job = trained(5)
    report(job, "81078603")
    take_over(job)
    assert "signs" in job.timers
    job.fire("signs")
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-1"]
    job.lose_coordinator()
    job.fire("signs")
    assert len(job.recorded(journal.Isolated)) == 1


def test_a_process_of_the_same_number_on_another_attempt_is_another_placement() -> None:
    """Numbers of processes come again, in containers often."""
    first = Driver(nodes=1, processes=1)
    first.hello(0, pid=7)
    again = journal.JobStarted(job_id="j", attempt=1, nodes=1, processes_per_node=1, pid=1)
    came = journal.NodeJoined(node=0, address="10.0.0.0", pid=7)
    assert len(earlier([*first.history, again, came]).placements[0]) == 2


# ---- deaths of coordinators in a row


def meet(job: Driver, finished: int) -> None:
    """All ranks meet at the next coordinator, as long as there is something to decide."""
    job.arrive(job.ranks, finished)
    if job.stores:
        job.store_up()
        job.ready(job.ranks)


def test_steps_between_two_deaths_of_coordinators_end_the_row() -> None:
    """A job may lose any number of them, as long as it trains in between."""
    job = trained(1)
    for finished in range(2, 9):
        take_over(job)
        meet(job, finished)
        job.step(finished + 1)
    assert strategies(job) == [Strategy.RETRY] * 7


def test_deaths_of_coordinators_without_a_step_between_are_a_row() -> None:
    """The policy limits them."""
    job = trained(5)
    for _ in range(4):
        take_over(job)
        meet(job, 5)
    assert strategies(job)[:3] == [Strategy.RETRY] * 3
    assert Strategy.RETRY not in strategies(job)[3:]
