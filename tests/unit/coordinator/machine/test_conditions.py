"""Device conditions that agents read: a fault code that appears or disappears is a health event."""

from __future__ import annotations

from jobs.driver import Driver
from jobs.trained import report, strategies, take_over, trained, untouched

from rekindle.protocol import agent as p
from rekindle.protocol.monitoring import Condition
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.faults.tables.verdict import Severity, Urgency
from rekindle.recovery.journal import journal
from rekindle.recovery.policy import annotations as a
from rekindle.recovery.policy.policy import Policy, Strategy

RESET, UNLISTED = "80E18005", "8F0A0A0A"
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
    reads(job, UNLISTED, health=1)
    reads(job, UNLISTED, health=1)
    assert events_in(job) == [(UNLISTED, 1, False)]
    reads(job, health=0)
    reads(job, health=0)
    assert events_in(job) == [(UNLISTED, 1, False), (UNLISTED, 1, True)]


def test_a_code_that_no_table_lists_is_no_worse_than_its_device() -> None:
    """An unlisted code is as severe as its device's health. Up to minor, the job ignores it."""
    job = trained()
    reads(job, UNLISTED, health=1)
    assert job.last(journal.HealthEventSeen).urgency is Urgency.NONE
    assert strategies(job) == []
    reads(job, UNLISTED, device=0, health=3)
    assert job.last(journal.HealthEventSeen).urgency is Urgency.NOW
    assert len(strategies(job)) == 1


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
    assert report(job, EventSource.ASCEND, UNLISTED, device=1, severity=Severity.MINOR) == ""
    before = events_in(job)
    reads(job, health=0)
    reads(job, UNLISTED, health=1)
    reads(job, health=0)
    assert events_in(job) == before


def test_another_coordinator_knows_whose_codes_they_are() -> None:
    job = trained()
    reads(job, UNLISTED, health=1)
    take_over(job)
    reads(job, UNLISTED, health=1)
    reads(job, health=0)
    assert events_in(job) == [(UNLISTED, 1, False), (UNLISTED, 1, True)]
