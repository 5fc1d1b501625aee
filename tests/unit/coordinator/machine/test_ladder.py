"""The machine and the upper rungs: placed anew, reset, isolated, and asked of a person first."""

from __future__ import annotations

import msgspec
import pytest
from jobs.trained import SIGKILL, report, strategies, trained, untouched

from rekindle.coordinator.machine.job_state import Phase
from rekindle.coordinator.machine.recovery import LOOK_S
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import ALLOWABLE, INNER, Policy, Strategy

OUTER_ONLY = Policy(
    strategies=tuple(s for s in ALLOWABLE if s not in INNER), max_restarts=1, max_reschedules=2
)


# ---- the job is placed anew


def test_a_job_that_is_placed_anew_ends_its_attempt() -> None:
    """Its coordinator ends with "rescheduled", after the final checkpoint is written."""
    job = untouched(msgspec.structs.replace(OUTER_ONLY, max_restarts=0))
    job.exits(1, code=3)
    assert strategies(job) == [Strategy.RESCHEDULE_JOB]
    job.killed()
    assert job.phase is Phase.ENDED
    assert (job.last(journal.Ended).outcome, job.outcome) == ("rescheduled", False)
    assert job.recorded(journal.Isolated) == []


def test_a_job_that_is_stopped_meanwhile_is_not_placed_anew() -> None:
    """A person's stop is stronger."""
    job = untouched(msgspec.structs.replace(OUTER_ONLY, max_restarts=0))
    job.exits(1, code=3)
    job.machine.endings.stop("enough")
    job.collect()
    job.killed()
    assert job.last(journal.Ended).outcome == "stopped"


def test_a_lost_node_is_isolated_and_the_job_placed_anew() -> None:
    """The host is named, for nothing more is to be placed there."""
    job = untouched(msgspec.structs.replace(OUTER_ONLY, max_restarts=0), nodes=2)
    job.lose(1)
    assert strategies(job) == [Strategy.RESCHEDULE_JOB_ISOLATED]
    isolated = job.recorded(journal.Isolated)
    assert [(event.node, event.host) for event in isolated] == [(1, "host-2")]
    job.killed()
    assert job.last(journal.Ended).outcome == "rescheduled"


def test_a_pod_alone_is_placed_anew_and_counted() -> None:
    """Another host fills the node's place; the script is told how often that has happened."""
    policy = msgspec.structs.replace(OUTER_ONLY, max_pod_reschedules=1)
    job = untouched(policy, nodes=2)
    assert {spawn.placements for spawn in job.told(p.Spawn).values()} <= {1}
    job.lose(1)
    assert strategies(job) == [Strategy.RESCHEDULE_POD]
    job.killed()
    job.hello(1)
    job.store_up()
    placements = {node: spawn.placements for node, spawn in job.told(p.Spawn).items()}
    assert placements == {0: 1, 1: 2}


# ---- a person is asked


ASKS = Policy(approve=(Strategy.RECOVER_IN_PLACE,))


def test_nothing_is_done_before_a_person_agrees() -> None:
    """The ranks leave their step and wait; then the strategy is carried out."""
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
    """The reason names who refused it, or that nobody answered."""
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
    """One that comes too early, twice, or for another incident is refused."""
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
    """It belongs to the incident, and is not forgotten."""
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
    """Two faults of one incident wait one after the other; each is answered by itself."""
    job = trained(5, policy=ASKS, processes=3)
    job.exits(0, signal=SIGKILL, finished=5, at=1.0)
    job.exits(1, signal=SIGKILL, finished=5, at=2.0)
    first = p.Approval(incident=1, granted=True, by="ann", about=1.0)
    assert job.machine.recovery.approve(first) == ""
    job.collect()
    assert "another request waits now" in job.machine.recovery.approve(first)
    assert job.machine.recovery.approve(msgspec.structs.replace(first, about=2.0)) == ""


def test_another_coordinator_goes_on_waiting_for_the_person() -> None:
    """What was asked stands in the journal."""
    job = trained(5, policy=ASKS)
    job.exits(0, signal=SIGKILL, finished=5)
    job.lose_coordinator()
    assert "approval" in job.timers
    assert journal.waits_for_approval(job.history) is not None
    assert job.machine.recovery.approve(p.Approval(incident=1, granted=True, by="ann")) == ""


# ---- signs of trouble


def test_a_sign_that_means_nothing_is_written_down() -> None:
    """Training does not notice."""
    job = trained(5)
    assert report(job, EventSource.XID, "92", device=1) == ""
    assert job.last(journal.SignSeen).urgency.value == "watch"
    assert job.phase is Phase.TRAINING
    assert report(job, EventSource.KERNEL, "all is well") == ""
    assert job.phase is Phase.TRAINING


@pytest.mark.parametrize(
    ("sign", "words"),
    [
        ({"source": EventSource.XID, "what": "many"}, "is not a number"),
        ({"source": EventSource.NODE_CONDITION, "what": "Ready"}, "Type=True"),
        ({"source": EventSource.XID, "what": "79", "node": 4}, "not have a node 4"),
        ({"source": EventSource.XID, "what": "79", "device": 2}, "devices 0 to 1, but not 2"),
        ({"source": EventSource.ASCEND, "what": "xyz"}, "'xyz' is not a fault code"),
    ],
)
def test_a_sign_that_cannot_be_read_is_refused(sign: dict[str, object], words: str) -> None:
    """The answer says what is wrong with it."""
    job = trained(5)
    assert words in job.machine.health.on_sign(HealthEvent(**{"node": 0} | sign), job.now)
    job.collect()
    assert job.recorded(journal.SignSeen) == []


def test_a_device_that_is_gone_takes_its_node_out() -> None:
    """XID 79: another host takes the place, and nothing more is placed on this one."""
    job = trained(5, nodes=2)
    assert report(job, EventSource.XID, "79", node=1, device=0) == ""
    assert strategies(job) == [Strategy.RECOVER]
    (fault,) = [event.fault for event in job.recorded(journal.FaultSeen)]
    assert (fault.kind, fault.rank, fault.code, fault.host) == (FaultKind.DEVICE, 2, "79", "host-2")
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [1]


def test_a_sign_is_answered_once() -> None:
    """However often a monitor repeats it; when it was gone in between, it is a new one."""
    job = trained(5)
    for _ in range(3):
        report(job, EventSource.XID, "63", device=1)
    assert len(job.recorded(journal.SignSeen)) == 1
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-1"]
    assert job.phase is Phase.TRAINING
    report(job, EventSource.XID, "63", device=1, gone=True)
    report(job, EventSource.XID, "63", device=1)
    assert [event.sign.gone for event in job.recorded(journal.SignSeen)] == [False, True, False]


def test_a_device_is_reset_before_its_rank_is_started() -> None:
    """Its process is ended first; the others keep theirs."""
    job = trained(5)
    report(job, EventSource.ASCEND, "80E18005", device=1)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]
    job.killed()
    ((_, spawn),) = job.unstarted
    assert (spawn.ranks, spawn.reset) == ((1,), (1,))


def test_a_device_that_cannot_be_reset_is_left() -> None:
    """The next strategy is taken: another node."""
    job = trained(5, nodes=2)
    report(job, EventSource.ASCEND, "80E18005", node=1, device=1)
    job.killed()
    job.unstarted.clear()
    job.say(1, p.DeviceResetFailed(rank=3, error="it does not answer"))
    assert strategies(job)[-1] is Strategy.RECOVER
    assert "it does not answer" in job.last(journal.Decided).reason


@pytest.mark.parametrize("first", ["sign", "rank"])
def test_a_rank_and_a_sign_tell_of_one_fault(first: str) -> None:
    """It is answered once, by the rank's own repair, and has the sign's code."""
    job = trained(5)

    def sign() -> None:
        report(job, EventSource.ASCEND, "80E01801", device=1)

    if first == "sign":
        sign()
        assert job.phase is Phase.TRAINING
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY)
    if first == "rank":
        sign()
    assert strategies(job) == [Strategy.RETRY]
    (past,) = job.machine.job.incidents.past
    assert (past.fault.kind, past.fault.code) == (FaultKind.DEVICE_MEMORY, "80E01801")
    job.lose_coordinator()
    assert job.machine.job.incidents.past == [past]


def test_memory_that_no_rank_has_noticed_is_not_trained_with() -> None:
    """Its process is replaced after a while."""
    job = trained(5)
    report(job, EventSource.ASCEND, "80E01801", device=1)
    job.now += LOOK_S + 1
    job.fire("signs")
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE]


def test_what_the_user_has_caused_isolates_nothing() -> None:
    """Whatever it is, and however often it comes."""
    job = trained(5, nodes=2)
    for _ in range(5):
        report(job, EventSource.ASCEND, "80C98002", device=1)
        report(job, EventSource.ASCEND, "80C98002", device=1, gone=True)
        report(job, EventSource.XID, "43", device=0)
        report(job, EventSource.XID, "43", device=0, gone=True)
    assert job.recorded(journal.Isolated) == []


def test_a_code_that_comes_too_often_takes_the_host_out() -> None:
    """Twice within a day, by MindCluster's rule: it is not reset again, and isolated."""
    job = trained(5, nodes=2)
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
    """A port that is down for more than 20 s; training goes on meanwhile."""
    job = trained(5)
    report(job, EventSource.ASCEND, "81078603", device=1)
    assert job.recorded(journal.Isolated) == []
    job.fire("signs")
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-1"]
    assert job.phase is Phase.TRAINING
    job.fire("signs")
    assert len(job.recorded(journal.Isolated)) == 1
