"""Device conditions that agents read: a fault code that appears or disappears is a health event."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import report, strategies, take_over, trained, untouched

from rekindle.coordinator.machine.health_events import HEALED_S
from rekindle.coordinator.machine.recovery import LOOK_S
from rekindle.job.spec import KeepsOff
from rekindle.protocol import agent as p
from rekindle.protocol.monitoring import Condition
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.tables.verdict import Severity, Urgency
from rekindle.recovery.journal import journal
from rekindle.recovery.policy import annotations as a
from rekindle.recovery.policy.policy import Policy, Strategy

RESET, HARMLESS, UNLISTED, OTHER = "80E18005", "80C98006", "8F0A0A0A", "8F0A0A0B"
HBM, USER = "80E01801", "80C98002"  # a restart heals them
ISOLATED = Strategy.RESCHEDULE_JOB_ISOLATED
AUTO = a.from_modelarts({a.JOB_RETRY_NUM: "8"}, Policy(strategies=()))


def reads(job: Driver, *codes: str, device: int = 1, health: int = 2) -> None:
    """Let the agent of node 0 read these fault codes of a device."""
    job.say(0, p.Conditions(devices={device: Condition(Severity(health), codes)}))


def events_in(job: Driver) -> list[tuple[str, int, bool]]:
    """Return what the journal recorded of each health event: code, device, whether it is over."""
    events = [event.health_event for event in job.recorded(journal.HealthEventSeen)]
    return [(each.what, each.device, each.gone) for each in events]


def test_a_code_that_a_table_lists_is_answered() -> None:
    """A listed code resets its device, although no rank reports a fault."""
    job = untouched(AUTO)
    reads(job, RESET)
    assert strategies(job) == [Strategy.RESTART]
    job.killed()
    job.store_up()
    assert [spawn.reset for _, spawn in job.unstarted] == [(1,)]


def test_what_stays_is_one_sign_and_what_goes_another() -> None:
    job = trained()
    reads(job, UNLISTED, health=0)
    reads(job, UNLISTED, health=0)
    assert events_in(job) == [(UNLISTED, 1, False)]
    reads(job, health=0)
    reads(job, health=0)
    assert events_in(job) == [(UNLISTED, 1, False), (UNLISTED, 1, True)]


def test_a_code_that_no_table_lists_is_no_worse_than_its_device() -> None:
    """An unlisted code that is alone is as severe as its device's health. Notices need nothing."""
    job = trained()
    reads(job, UNLISTED, health=0)
    assert job.last(journal.HealthEventSeen).urgency is Urgency.NONE
    assert strategies(job) == []
    reads(job, UNLISTED, device=0, health=3)
    assert job.last(journal.HealthEventSeen).urgency is Urgency.NOW
    assert len(strategies(job)) == 1


@pytest.mark.parametrize(
    ("readings", "severities"),
    [
        # (codes, health) of each reading -> the severities that the journal has in the end
        ([((UNLISTED,), 2)], {UNLISTED: 2}),
        ([((RESET,), 2), ((RESET, UNLISTED), 2)], {RESET: 2, UNLISTED: 0}),
        ([((RESET, UNLISTED), 2)], {RESET: 2, UNLISTED: 0}),
        ([((UNLISTED,), 0), ((UNLISTED, RESET), 2)], {UNLISTED: 0, RESET: 2}),
        ([((UNLISTED,), 0), ((UNLISTED, OTHER), 2)], {UNLISTED: 0, OTHER: 2}),
        ([((OTHER,), 2), ((UNLISTED, OTHER), 2)], {UNLISTED: 0, OTHER: 2}),
        ([((OTHER,), 1), ((UNLISTED, OTHER), 3)], {UNLISTED: 3, OTHER: 1}),
        ([((UNLISTED, OTHER), 2)], {UNLISTED: 2, OTHER: 2}),  # nothing tells them apart
        # the code that explained the health has gone, and the health has not
        ([((RESET, UNLISTED), 2), ((UNLISTED,), 2)], {UNLISTED: 2}),
        ([((RESET, UNLISTED), 2), ((UNLISTED,), 0)], {UNLISTED: 0}),
        # a listed code that demands nothing may explain nothing
        ([((HARMLESS, UNLISTED), 2)], {HARMLESS: 2, UNLISTED: 2}),
        ([((HARMLESS,), 1), ((HARMLESS, UNLISTED), 1)], {HARMLESS: 1, UNLISTED: 0}),
    ],
)
def test_the_health_of_a_device_is_that_of_its_worst_fault(
    readings: list[tuple[tuple[str, ...], int]], severities: dict[str, int]
) -> None:
    """A notice beside a major fault is a notice: other codes of the device explain its health."""
    job = trained()
    for codes, health in readings:
        reads(job, *codes, health=health)
    present = job.machine.job.health_events.codes("host-1", 1)
    assert {code: event.severity for code, event in present.items()} == severities


def test_a_notice_beside_a_major_fault_isolates_nothing() -> None:
    """The major fault heals by a reset; the notice changes nothing, before and after it."""
    job = trained(5, nodes=2)
    reads(job, UNLISTED, RESET, health=2)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    job.killed()
    job.spawned()
    reads(job, UNLISTED, health=0)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    assert job.recorded(journal.Isolated) == []


@pytest.mark.parametrize(
    ("health", "answers"),
    [(0, []), (1, [Strategy.RESTART]), (2, [Strategy.RESTART]), (3, [ISOLATED])],
)
def test_levels_of_the_document(health: int, answers: list[Strategy]) -> None:
    """Notices need nothing, minor and major faults heal in place, and critical ones do not."""
    job = untouched(AUTO, nodes=2)
    reads(job, UNLISTED, health=health)
    assert strategies(job) == answers
    assert bool(job.recorded(journal.Isolated)) == (answers == [ISOLATED])


def test_while_a_device_is_reset_nothing_counts_and_what_is_left_is_news() -> None:
    job = untouched(AUTO)
    reads(job, RESET)
    job.killed()
    job.store_up()
    before = events_in(job)
    reads(job, RESET, UNLISTED)
    reads(job)
    assert events_in(job) == before
    job.spawned()
    assert events_in(job) == [*before, (RESET, 1, True)]
    reads(job, RESET)
    assert events_in(job)[-1] == (RESET, 1, False)


def test_what_somebody_else_has_reported_stays() -> None:
    """A code that another source reported stays, because DCMI may never list it.

    The other source is a person or MindCluster.
    """
    job = trained()
    assert report(job, EventSource.ASCEND, UNLISTED, device=1, severity=Severity.NOTICE) == ""
    before = events_in(job)
    reads(job, health=0)
    reads(job, UNLISTED, health=0)
    reads(job, health=0)
    assert events_in(job) == before


def test_another_coordinator_knows_whose_codes_they_are() -> None:
    job = trained()
    reads(job, UNLISTED, health=0)
    take_over(job)
    reads(job, UNLISTED, health=0)
    reads(job, health=0)
    assert events_in(job) == [(UNLISTED, 1, False), (UNLISTED, 1, True)]


# ---- a fault that a restart of the processes heals


def restarted(code: str, policy: Policy = AUTO) -> Driver:
    """Return a job of two nodes that has restarted because of a code of a device."""
    job = untouched(policy, nodes=2)
    reads(job, code)
    if not strategies(job):  # the rank may have met the fault, and did not
        job.now += LOOK_S
        job.fire("health-events")
    assert strategies(job) == [Strategy.RESTART]
    job.killed()
    job.store_up()
    assert [spawn.reset for _, spawn in job.unstarted] == [(), ()]
    job.spawned()
    return job


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_fault_that_stays_after_the_restart_isolates_its_host(taken_over: bool) -> None:
    """The driver has two looks to report that the code has gone. Then the host is isolated."""
    job = restarted(HBM)
    if taken_over:
        take_over(job, training=False)
    job.now += LOOK_S
    for _ in range(2):
        reads(job, HBM)
        assert strategies(job) == [Strategy.RESTART]
        job.now += HEALED_S / 2
    reads(job, HBM)
    assert strategies(job) == [Strategy.RESTART, ISOLATED]
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-1"]
    fault = job.last(journal.Decided).fault
    assert (fault.reset_failed, fault.rank, fault.code) == (True, 1, HBM)
    assert "it was not healed" in job.last(journal.Decided).reason


def test_what_goes_after_the_restart_is_healed() -> None:
    """A code that goes and comes again later is another fault, with a restart of its own."""
    job = restarted(HBM)
    job.now += 1
    reads(job)
    job.now += HEALED_S
    reads(job, HBM)
    job.now += LOOK_S
    job.fire("health-events")
    assert strategies(job) == [Strategy.RESTART] * 2
    assert job.recorded(journal.Isolated) == []


def test_what_comes_after_the_start_has_not_outlasted_it() -> None:
    """Codes that a restart does not have to heal, and codes of later faults, are no such fault."""
    job = restarted(HBM)
    reads(job, UNLISTED, health=0)
    job.now += HEALED_S
    reads(job, UNLISTED, RESET, health=0)
    assert strategies(job) == [Strategy.RESTART] * 2  # the second one resets the device
    assert job.recorded(journal.Isolated) == []


@pytest.mark.parametrize("ahead_s", [-60.0, 60.0])
def test_late_readings_and_other_clocks_isolate_nothing(ahead_s: float) -> None:
    """An agent keeps readings while no coordinator answers. The next one has another clock."""
    job = restarted(HBM)
    job.now += ahead_s
    take_over(job, training=False)
    reads(job, HBM)
    reads(job)
    job.now += HEALED_S
    reads(job, HBM)
    assert job.recorded(journal.Isolated) == []


def test_what_only_a_monitor_has_reported_is_not_older() -> None:
    """DCMI reports such a code for the first time days after the restart: it is another fault."""
    job = untouched(AUTO, nodes=2)
    report(job, EventSource.ASCEND, HBM, device=1)
    job.now += LOOK_S
    job.fire("health-events")
    job.killed()
    job.store_up()
    job.spawned()
    job.now += 3 * 86400
    for _ in range(2):
        reads(job, HBM)
        job.now += HEALED_S
    assert job.recorded(journal.Isolated) == []


def test_a_fault_of_the_user_that_stays_isolates_nothing() -> None:
    """The input of the job causes it, so the job is placed again, and no host is isolated."""
    job = restarted(USER)
    reads(job, USER)
    job.now += HEALED_S
    reads(job, USER)
    assert strategies(job) == [Strategy.RESTART, Strategy.RESCHEDULE_JOB]
    assert job.recorded(journal.Isolated) == []


def test_a_fault_of_the_only_host_that_stays_ends_the_job() -> None:
    """There is no other machine, so the job fails with the reason."""
    job = untouched(Policy(), keeps_off=KeepsOff.ONE_HOST)
    reads(job, HBM)
    job.now += LOOK_S
    job.fire("health-events")
    job.killed()
    job.store_up()
    job.spawned()
    reads(job, HBM)
    job.now += HEALED_S
    reads(job, HBM)
    assert strategies(job) == [Strategy.RESTART, Strategy.FAIL]
    assert "it was not healed" in job.last(journal.Decided).reason
