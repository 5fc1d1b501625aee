"""The outer strategies: reschedule, reset, isolation, and the approval of a person."""

from __future__ import annotations

import msgspec
import pytest
from jobs.trained import SIGKILL, report, strategies, trained, untouched

from rekindle.coordinator.machine.job_state import Phase
from rekindle.coordinator.machine.recovery import LOOK_S
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import attempts, journal
from rekindle.recovery.policy.dialect import Dialect
from rekindle.recovery.policy.policy import ALLOWABLE, INNER, Policy, Strategy

OUTER_ONLY = Policy(
    strategies=tuple(s for s in ALLOWABLE if s not in INNER), max_restarts=1, max_reschedules=2
)


# ---- the job is rescheduled


def test_a_job_that_is_placed_anew_ends_its_attempt() -> None:
    """A reschedule of the job ends the attempt as rescheduled and isolates no host."""
    job = untouched(msgspec.structs.replace(OUTER_ONLY, max_restarts=0))
    job.exits(1, code=3)
    assert strategies(job) == [Strategy.RESCHEDULE_JOB]
    job.killed()
    assert job.phase is Phase.ENDED
    assert (job.last(journal.Ended).outcome, job.outcome) == ("rescheduled", False)
    assert job.recorded(journal.Isolated) == []


def test_a_job_that_is_stopped_meanwhile_is_not_placed_anew() -> None:
    """If a person stops the job during a reschedule, it ends as stopped."""
    job = untouched(msgspec.structs.replace(OUTER_ONLY, max_restarts=0))
    job.exits(1, code=3)
    job.machine.endings.stop("enough")
    job.collect()
    job.killed()
    assert job.last(journal.Ended).outcome == "stopped"


def test_a_lost_node_is_isolated_and_the_job_placed_anew() -> None:
    """A lost node's host is isolated, so that the scheduler places nothing more there."""
    job = untouched(msgspec.structs.replace(OUTER_ONLY, max_restarts=0), nodes=2)
    job.lose(1)
    assert strategies(job) == [Strategy.RESCHEDULE_JOB_ISOLATED]
    isolated = job.recorded(journal.Isolated)
    assert [(event.node, event.host) for event in isolated] == [(1, "host-2")]
    job.killed()
    assert job.last(journal.Ended).outcome == "rescheduled"


def test_a_pod_alone_is_placed_anew_and_counted() -> None:
    """If only a pod is rescheduled, the order to start its ranks has the number of placements.

    The other node keeps its number.
    """
    policy = msgspec.structs.replace(OUTER_ONLY, max_pod_reschedules=1)
    job = untouched(policy, nodes=2)
    assert {spawn.placements for spawn in job.sent_by_node(p.Spawn).values()} <= {1}
    job.lose(1)
    assert strategies(job) == [Strategy.RESCHEDULE_POD]
    job.killed()
    job.hello(1)
    job.store_up()
    placements = {node: spawn.placements for node, spawn in job.sent_by_node(p.Spawn).items()}
    assert placements == {0: 1, 1: 2}


# ---- a person is asked


ASKS = Policy(approve=(Strategy.RECOVER_IN_PLACE,))


def test_nothing_is_done_before_a_person_agrees() -> None:
    """The ranks leave their step and wait. After the approval, the strategy runs."""
    job = trained(5, policy=ASKS)
    job.exits(0, signal=SIGKILL, finished=5)
    assert job.last(journal.Decided).approval
    job.arrive([1], finished=5)
    assert job.unstarted == []
    assert job.timers["approval"] == ASKS.approval_timeout_s
    assert job.machine.recovery.approve(p.Approval(incident=1, granted=True, by="ann")) == ""
    job.collect()
    assert job.spawned_now() == [0]
    assert job.last(journal.Answered).by == "ann"
    assert "approval" not in job.timers
    job.spawned()
    job.arrive([0])
    assert job.phase is Phase.RESTORING


@pytest.mark.parametrize("late", [False, True])
def test_what_is_refused_or_not_answered_ends_the_job(late: bool) -> None:
    """If a person refuses or does not answer in time, the job fails."""
    job = trained(5, policy=ASKS)
    job.exits(0, signal=SIGKILL, finished=5)
    if late:
        job.fire("approval")
    else:
        job.machine.recovery.approve(p.Approval(incident=1, granted=False, by="ann"))
        job.collect()
    assert job.phase is Phase.STOPPING
    job.killed()
    ended = job.last(journal.Ended)
    assert ended.outcome == "failed"
    assert not job.last(journal.Answered).granted


def test_an_answer_must_be_meant_for_what_waits() -> None:
    """An answer is refused if no incident waits, or if it is for another incident."""
    job = trained(5, policy=ASKS)
    yes = p.Approval(incident=1, granted=True, by="ann")
    assert "no incident waits" in job.machine.recovery.approve(yes)
    job.exits(0, signal=SIGKILL, finished=5)
    other = msgspec.structs.replace(yes, incident=7)
    assert "incident 1 waits for approval, not 7" in job.machine.recovery.approve(other)
    assert job.machine.recovery.approve(yes) == ""
    job.collect()
    assert "no incident waits" in job.machine.recovery.approve(yes)


def test_a_fault_that_comes_while_a_person_is_asked_is_decided_after() -> None:
    """A fault during a request for approval joins the incident and is decided after the answer."""
    job = trained(5, policy=ASKS, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.exits(1, signal=SIGKILL, finished=5)
    assert job.unstarted == []
    job.machine.recovery.approve(p.Approval(incident=1, granted=True, by="ann"))
    job.collect()
    assert job.machine.recovery.approve(p.Approval(incident=1, granted=True, by="ann")) == ""
    job.collect()
    job.spawned()
    assert set(job.pids) == {0, 1, 2}
    assert len(job.recorded(journal.FaultSeen)) == 2


def test_a_late_answer_is_not_taken_for_one_to_the_next_question() -> None:
    """If two faults of one incident wait for approval, each needs its own answer."""
    job = trained(5, policy=ASKS, processes=3)
    job.exits(0, signal=SIGKILL, finished=5, at=1.0)
    job.exits(1, signal=SIGKILL, finished=5, at=2.0)
    first = p.Approval(incident=1, granted=True, by="ann", about=1.0)
    assert job.machine.recovery.approve(first) == ""
    job.collect()
    assert "another request waits now" in job.machine.recovery.approve(first)
    assert job.machine.recovery.approve(msgspec.structs.replace(first, about=2.0)) == ""


def test_another_coordinator_goes_on_waiting_for_the_person() -> None:
    """The request is in the journal, so a new coordinator also waits for the answer."""
    job = trained(5, policy=ASKS)
    job.exits(0, signal=SIGKILL, finished=5)
    job.lose_coordinator()
    assert "approval" in job.timers
    assert attempts.waits_for_approval(job.history) is not None
    assert job.machine.recovery.approve(p.Approval(incident=1, granted=True, by="ann")) == ""


# ---- health events


def test_a_sign_that_means_nothing_is_written_down() -> None:
    """A health event without a consequence is recorded, and training continues."""
    job = trained(5)
    assert report(job, EventSource.XID, "92", device=1) == ""
    assert job.last(journal.HealthEventSeen).urgency.value == "watch"
    assert job.phase is Phase.TRAINING
    assert report(job, EventSource.KERNEL, "all is well") == ""
    assert job.phase is Phase.TRAINING


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"source": EventSource.XID, "what": "many"}, "is not a number"),
        ({"source": EventSource.NODE_CONDITION, "what": "Ready"}, "Type=True"),
        ({"source": EventSource.XID, "what": "79", "node": 4}, "not have a node 4"),
        ({"source": EventSource.XID, "what": "79", "device": 2}, "devices 0 to 1, but not 2"),
        ({"source": EventSource.ASCEND, "what": "xyz"}, "'xyz' is not a fault code"),
    ],
)
def test_a_sign_that_cannot_be_read_is_refused(event: dict[str, object], words: str) -> None:
    """A health event that cannot be read is refused, and the answer states the error."""
    job = trained(5)
    assert words in job.machine.health.on_health_event(HealthEvent(**{"node": 0} | event), job.now)
    job.collect()
    assert job.recorded(journal.HealthEventSeen) == []


def test_a_device_that_is_gone_takes_its_node_out() -> None:
    """After XID 79, the job requests a node on another host and isolates this one."""
    job = trained(5, nodes=2)
    assert report(job, EventSource.XID, "79", node=1, device=0) == ""
    assert strategies(job) == [Strategy.RECOVER]
    (fault,) = [event.fault for event in job.recorded(journal.FaultSeen)]
    assert (fault.kind, fault.rank, fault.code, fault.host) == (FaultKind.DEVICE, 2, "79", "host-2")
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [1]


def test_a_sign_is_answered_once() -> None:
    """A repeated health event is answered once. After it was gone, it counts as new."""
    job = trained(5)
    for _ in range(3):
        report(job, EventSource.XID, "63", device=1)
    assert len(job.recorded(journal.HealthEventSeen)) == 1
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-1"]
    assert job.phase is Phase.TRAINING
    report(job, EventSource.XID, "63", device=1, gone=True)
    report(job, EventSource.XID, "63", device=1)
    assert [event.health_event.gone for event in job.recorded(journal.HealthEventSeen)] == [
        False,
        True,
        False,
    ]


def test_a_device_is_reset_before_its_rank_is_started() -> None:
    """The process of the device's rank ends before the reset. The other processes stay."""
    job = trained(5)
    report(job, EventSource.ASCEND, "80E18005", device=1)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    job.killed()
    ((_, spawn),) = job.unstarted
    assert (spawn.ranks, spawn.reset) == ((1,), (1,))


def test_a_device_that_cannot_be_reset_is_left() -> None:
    """If a device cannot be reset, the next strategy moves its rank to another node."""
    job = trained(5, nodes=2)
    report(job, EventSource.ASCEND, "80E18005", node=1, device=1)
    job.killed()
    job.unstarted.clear()
    job.say(1, p.DeviceResetFailed(rank=3, error="it does not answer"))
    assert strategies(job)[-1] is Strategy.RECOVER
    assert "it does not answer" in job.last(journal.Decided).reason


@pytest.mark.parametrize("first", ["event", "rank"])
def test_a_rank_and_a_sign_tell_of_one_fault(first: str) -> None:
    """A rank and a health event that report one fault cause one decision, with the event's code.

    The strategy is the rank's own repair.
    """
    job = trained(5)

    def event() -> None:
        report(job, EventSource.ASCEND, "80E01801", device=1)

    if first == "event":
        event()
        assert job.phase is Phase.TRAINING
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY)
    if first == "rank":
        event()
    assert strategies(job) == [Strategy.RETRY]
    (past,) = job.machine.job.incidents.past
    assert (past.fault.kind, past.fault.code) == (FaultKind.DEVICE_MEMORY, "80E01801")
    job.lose_coordinator()
    assert job.machine.job.incidents.past == [past]


def test_memory_that_no_rank_has_noticed_is_not_trained_with() -> None:
    """If no rank reports damaged memory in time, the process that uses it is replaced."""
    job = trained(5)
    report(job, EventSource.ASCEND, "80E01801", device=1)
    job.now += LOOK_S + 1
    job.fire("health-events")
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]


def test_what_the_user_has_caused_isolates_nothing() -> None:
    """Faults that the user caused isolate no host, however often they occur."""
    job = trained(5, nodes=2)
    for _ in range(5):
        report(job, EventSource.ASCEND, "80C98002", device=1)
        report(job, EventSource.ASCEND, "80C98002", device=1, gone=True)
        report(job, EventSource.XID, "43", device=0)
        report(job, EventSource.XID, "43", device=0, gone=True)
    assert job.recorded(journal.Isolated) == []


def test_a_code_that_comes_too_often_takes_the_host_out() -> None:
    """A code that occurs twice in a day isolates the host instead of a second reset.

    The rule comes from MindCluster.
    """
    job = trained(5, nodes=2, policy=Policy(max_restarts=0, dialect=Dialect.MINDCLUSTER))
    report(job, EventSource.ASCEND, "80C98008", node=1, device=1)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    report(job, EventSource.ASCEND, "80C98008", node=1, device=1, gone=True)
    job.killed()
    job.spawned()
    job.form(5)
    job.step(6)
    job.now += 3600
    report(job, EventSource.ASCEND, "80C98008", node=1, device=1)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE, Strategy.RECOVER]
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-2"]


def test_a_code_that_stays_too_long_keeps_new_work_away() -> None:
    """A port that stays down for more than 20 s isolates the host. Training continues."""
    job = trained(5)
    report(job, EventSource.ASCEND, "81078603", device=1)
    assert job.recorded(journal.Isolated) == []
    job.fire("health-events")
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-1"]
    assert job.phase is Phase.TRAINING
    job.fire("health-events")
    assert len(job.recorded(journal.Isolated)) == 1
