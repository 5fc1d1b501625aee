"""Health events before, during and after the reports of the ranks."""

from __future__ import annotations

import msgspec
import pytest
from jobs.driver import Driver
from jobs.trained import SIGKILL, report, strategies, trained, untouched

from rekindle.coordinator.machine.job_state import Phase
from rekindle.job.spec import KeepsOff
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.verdict import Urgency
from rekindle.recovery.journal import journal
from rekindle.recovery.policy import annotations as a
from rekindle.recovery.policy.dialect import Dialect
from rekindle.recovery.policy.policy import Policy, Strategy

SIGABRT = 6
HBM, RESET, SEPARATE = "80E01801", "80E18005", "80E18402"
BUS = "80C98009"  # MindCluster's table has no number for it
RETRY, IN_PLACE, RECOVER = Strategy.RETRY, Strategy.RECOVER_IN_PLACE, Strategy.RECOVER
RESTART, POD = Strategy.RESTART, Strategy.RESCHEDULE_POD
ISOLATED = Strategy.RESCHEDULE_JOB_ISOLATED
AUTO = a.from_modelarts({a.JOB_RETRY_NUM: "8"}, Policy(strategies=()))
PODS = a.from_modelarts(
    {a.JOB_RETRY_NUM: "8", a.POD_RETRY_NUM: "3"}, Policy(strategies=(), approve=(POD,))
)
NCCL = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited"


def reset_helps(job: Driver) -> list[tuple[int, ...]]:
    """Return the ranks to reset in each start order that no agent has answered yet."""
    return [spawn.reset for _, spawn in job.unstarted]


def ascend(job: Driver, code: str, device: int = 1, **more: object) -> None:
    """Report a fault code of a chip, which the job accepts."""
    assert report(job, EventSource.ASCEND, code, device=device, **more) == ""


def pass_time(job: Driver, seconds: float) -> None:
    """Let time pass without events."""
    job.now += seconds


def break_memory(job: Driver, code: str, *, times: int, sign_first: bool = False) -> None:
    """Break memory of rank 3 on node 1 `times` times, one hour apart.

    All but the last are repaired.
    """
    for number in range(1, times + 1):
        if sign_first:
            ascend(job, code, node=1)
        job.fail_step(3, kind=FaultKind.DEVICE_MEMORY)
        if not sign_first:
            ascend(job, code, node=1)
        if number < times:
            ascend(job, code, node=1, gone=True)
            assert strategies(job)[-1] is RETRY
            job.form(5)
            job.step(5 + number)
            pass_time(job, 3600)


# ---- the cause of a rank's exit


@pytest.mark.parametrize("code", [HBM, RESET])
def test_a_sign_tells_of_what_a_bare_status_comes(code: str) -> None:
    """If a chip fault explains a rank's exit status, all ranks restart, and the chip may heal.

    No node is at fault, so the policy allows no other strategy. The code demands no reset.
    """
    job = untouched(AUTO)
    ascend(job, code)
    if code == RESET:
        assert strategies(job) == [RESTART]  # the device is unusable, whatever its rank reports
        return
    pass_time(job, 0.5)
    job.exits(1, code=1)
    assert strategies(job) == [RESTART]
    job.killed()
    job.store_up()
    assert reset_helps(job) == [()]


@pytest.mark.parametrize(("devices", "reported"), [(True, False), (False, True)])
def test_the_end_waits_for_a_sign_that_may_tell_more(devices: bool, reported: bool) -> None:
    """An exit is not decided until a health event may have explained it.

    The job waits if the host has devices, or if a health event was reported before.
    """
    job = untouched(AUTO, devices=devices)
    if reported:
        report(job, EventSource.XID, "92", device=0)
    job.exits(0, code=1)
    assert strategies(job) == []
    assert job.unstarted == []
    pass_time(job, 0.05)
    ascend(job, RESET, device=0)
    assert strategies(job) == [RESTART]
    job.killed()
    job.store_up()
    assert reset_helps(job) == [(0,)]


def test_a_peers_link_is_not_the_end_while_the_cause_may_show_itself() -> None:
    """A peer's broken link does not end the job while a health event may arrive.

    Here the event is about another rank's chip.
    """
    job = untouched(AUTO, devices=True)
    job.raises(0, NCCL)
    assert job.last(journal.FaultSeen).fault.kind is FaultKind.LINK
    assert strategies(job) == []
    ascend(job, RESET, device=1)
    assert strategies(job) == [RESTART]
    job.killed()
    assert "doubt" in job.timers
    job.fire("doubt")  # the rank starts with all others
    assert strategies(job) == [RESTART]


def test_the_end_comes_if_no_sign_does() -> None:
    """If no health event arrives in time, the exit is decided without one."""
    job = untouched(AUTO, devices=True)
    job.exits(0, code=1)
    job.fire("doubt")
    assert strategies(job) == [Strategy.FAIL]
    assert job.phase is Phase.STOPPING


@pytest.mark.parametrize("error", ["", "ValueError: no"])
def test_a_users_error_ends_the_job_at_once(error: str) -> None:
    """An exception of the user's code ends the job immediately.

    An exit status also does, if no device could explain it.
    """
    job = untouched(AUTO, devices=bool(error))
    if error:
        job.raises(0, error)
    else:
        job.exits(0, code=3)
    assert strategies(job) == [Strategy.FAIL]


# ---- health events after the decision


def test_a_device_to_be_isolated_is_not_started_on_again() -> None:
    """A rank that has restarted in place moves to another node if its device must be isolated."""
    job = trained(5, nodes=2)
    job.exits(3, signal=SIGABRT, finished=5)
    assert strategies(job) == [IN_PLACE]
    pass_time(job, 1)
    ascend(job, SEPARATE, node=1)
    assert strategies(job) == [IN_PLACE, RECOVER]
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-2"]
    assert len(job.machine.job.incidents.past) == 1  # both decisions are about one fault


def test_a_device_that_can_be_reset_is_reset_after_all() -> None:
    """If a later health event shows that a reset helps, the new process ends for the reset."""
    job = trained(5)
    job.exits(1, signal=SIGABRT, finished=5)
    assert reset_helps(job) == [()]
    ascend(job, RESET)
    assert strategies(job) == [IN_PLACE, IN_PLACE]
    job.killed()
    assert reset_helps(job) == [(1,)]


def test_a_device_that_a_restart_heals_needs_no_second_one() -> None:
    """If the code of a later health event demands no reset, the new process stays."""
    job = trained(5)
    job.exits(1, signal=SIGABRT, finished=5)
    ascend(job, HBM)
    assert strategies(job) == [IN_PLACE]
    assert reset_helps(job) == [()]


def test_a_device_is_reset_by_the_restart_that_is_under_way() -> None:
    """If a reset is requested during a restart, the same restart carries it out."""
    job = untouched(Policy(max_restarts=1))
    job.exits(1, signal=SIGABRT)
    assert job.phase is Phase.RESTARTING
    ascend(job, RESET)
    job.killed()
    job.store_up()
    assert reset_helps(job) == [(1,)]
    assert job.machine.job.restarts == 1


@pytest.mark.parametrize("first", ["sign", "rank"])
@pytest.mark.parametrize(
    ("dialect", "code", "times", "isolated"),
    [
        # ModelArts: three consecutive times within a day. Without a platform its rule applies, too.
        (Dialect.MODELARTS, HBM, 2, False),
        (Dialect.MODELARTS, HBM, 3, True),
        (Dialect.MODELARTS, BUS, 3, True),
        (Dialect.NONE, HBM, 2, False),
        (Dialect.NONE, HBM, 3, True),
        (Dialect.NONE, BUS, 3, True),
        # MindCluster: the number that its table gives for the code, and no number without one.
        (Dialect.MINDCLUSTER, HBM, 1, False),
        (Dialect.MINDCLUSTER, HBM, 2, True),
        (Dialect.MINDCLUSTER, BUS, 4, False),
    ],
)
def test_memory_that_breaks_again_and_again(
    dialect: Dialect, code: str, times: int, isolated: bool, first: str
) -> None:
    """The dialect of the policy decides how often a device may have a code that a rank repairs."""
    job = trained(5, nodes=2, policy=Policy(max_restarts=0, dialect=dialect))
    break_memory(job, code, times=times, sign_first=first == "sign")
    assert strategies(job)[-1] is (RECOVER if isolated else RETRY)
    isolations = [event.host for event in job.recorded(journal.Isolated)]
    assert isolations == (["host-2"] if isolated else [])


def test_a_sign_that_changes_nothing_costs_nothing() -> None:
    """A health event that changes no decision uses no budget, even if the budget is used up."""
    job = trained(5, policy=Policy(max_recoveries=1))
    job.fail_step(1, kind=FaultKind.DEVICE_MEMORY)
    ascend(job, HBM)
    assert strategies(job) == [RETRY]
    job.form(5)
    assert job.phase is Phase.TRAINING


# ---- health events that name no rank


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (EventSource.KERNEL, "Out of memory: Killed process 77 (sidecar) total-vm:18374kB"),
        (EventSource.KERNEL, "NVRM: Xid (PCI:0000:c6:00): 13, pid=77, Graphics Exception"),
        (EventSource.POD_REASON, "Error"),
    ],
)
@pytest.mark.parametrize("recovering", [False, True])
def test_what_struck_nobody_known_ends_nothing(
    source: EventSource, what: str, recovering: bool
) -> None:
    """A health event that affects no known rank ends no rank: an affected rank fails on its own."""
    job = trained(5)
    if recovering:
        job.exits(0, signal=SIGKILL, finished=5)
    assert report(job, source, what) == ""
    assert job.last(journal.HealthEventSeen).health_event.what == what
    assert strategies(job) == ([IN_PLACE] if recovering else [])
    if recovering:
        job.spawned()
        job.form(5)
    assert job.phase is Phase.TRAINING


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (EventSource.ASCEND, "[0x08520003,na,cpu,na]"),
        (EventSource.NODE_CONDITION, "NetworkUnavailable=True"),
        (EventSource.NODE_CONDITION, "KernelDeadlock=True"),
    ],
)
@pytest.mark.parametrize("session", [True, False])
def test_a_node_that_is_at_fault_is_isolated(source: EventSource, what: str, session: bool) -> None:
    """A fault of a node's switch, network or kernel isolates its host."""
    job = trained(5, nodes=2) if session else untouched(AUTO, nodes=2)
    assert report(job, source, what, node=1) == ""
    assert strategies(job) == [RECOVER if session else ISOLATED]
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-2"]


@pytest.mark.parametrize("what", ["Ready=False", "Ready=Unknown", "Exists=False"])
def test_a_node_that_only_kubernetes_misses_goes_on_training(what: str) -> None:
    """If only Kubernetes reports a node as lost, training continues: its agent is connected.

    After an outage of the control plane, all nodes have this status.
    """
    job = trained(5, nodes=2)
    for node in (0, 1):
        assert report(job, EventSource.NODE_CONDITION, what, node=node) == ""
    assert job.last(journal.HealthEventSeen).urgency is Urgency.WATCH
    assert strategies(job) == []
    assert job.phase is Phase.TRAINING


def test_what_ails_the_host_that_a_node_has_left_is_not_its_own() -> None:
    """A health event about the old host of a replaced node does not affect the new host."""
    job = trained(5, nodes=2)
    deadlock = HealthEvent(
        source=EventSource.NODE_CONDITION, what="KernelDeadlock=True", node=1, host="host-2"
    )
    answer = job.machine.health.on_health_event(
        msgspec.structs.replace(deadlock, host="host-7"), job.now
    )
    assert answer == "node 1 is not on host-7"
    job.lose(1)
    job.hello(1, host="host-3")
    before = strategies(job)
    assert job.machine.health.on_health_event(deadlock, job.now + 60) == ""
    job.collect()
    assert job.last(journal.HealthEventSeen).host == "host-2"
    assert strategies(job) == before
    assert job.recorded(journal.Isolated) == []


def test_a_node_that_is_not_ready_is_not_started_on_again() -> None:
    """If a node is not ready, all ranks restart, and its own ranks start on another node."""
    job = untouched(Policy(max_restarts=2), nodes=2)
    assert report(job, EventSource.POD_REASON, "NodeLost", node=1) == ""
    assert strategies(job) == [RESTART]
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [1]
    assert job.last(journal.NodeLeft).node == 1
    job.killed()
    assert job.phase is Phase.GATHERING


# ---- faults while ranks end, or while a person is asked


def test_devices_that_break_together_are_reset_together() -> None:
    """Two devices that break during one restart are reset together."""
    job = untouched(AUTO)
    ascend(job, RESET, device=0)
    ascend(job, RESET, device=1)
    job.killed()
    job.store_up()
    assert reset_helps(job) == [(0, 1)]
    assert job.machine.job.restarts == 1


def test_a_device_that_cannot_reset_is_isolated_during_a_restart() -> None:
    """If another device cannot be reset during a restart, the job moves away from its node.

    The platform reschedules the job.
    """
    job = untouched(AUTO, nodes=2)
    ascend(job, RESET, device=0)
    ascend(job, SEPARATE, device=1, node=1)
    assert strategies(job) == [RESTART, ISOLATED]
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-2"]
    job.killed()
    assert job.last(journal.Ended).outcome == "rescheduled"


def test_a_sick_node_is_replaced_during_a_restart() -> None:
    """If a node fails during a restart, another node replaces it, and the restart continues."""
    job = trained(5, nodes=2, policy=Policy(max_restarts=1))
    job.raises(0)
    assert job.phase is Phase.RESTARTING
    assert report(job, EventSource.NODE_CONDITION, "KernelDeadlock=True", node=1) == ""
    assert strategies(job) == [RESTART, RECOVER]
    job.killed()
    assert job.phase is Phase.GATHERING
    assert job.machine.job.restarts == 1
    job.hello(1)
    job.store_up()
    assert job.spawned_now() == [0, 1, 2, 3]


def test_a_node_that_is_lost_during_a_restart_needs_no_other() -> None:
    """A restart waits for a node that is lost during it, so no further decision follows."""
    job = trained(5, nodes=2, policy=Policy(max_restarts=1))
    job.raises(0)
    job.lose(1)
    assert strategies(job) == [RESTART]
    job.killed()
    assert job.phase is Phase.GATHERING


def test_a_sick_node_is_not_forgotten_when_a_person_grants_another() -> None:
    """If a second node fails while a person is asked, the next request is about that node."""
    job = untouched(PODS, nodes=3)
    job.lose(1)
    assert job.last(journal.Decided).approval
    assert report(job, EventSource.NODE_CONDITION, "KernelDeadlock=True", node=2) == ""
    assert len(job.recorded(journal.Decided)) == 1
    yes = p.Approval(incident=1, granted=True, by="ann")
    assert job.machine.recovery.approve(yes) == ""
    job.collect()
    assert strategies(job) == [POD, POD]
    assert job.machine.recovery.approve(yes) == ""
    job.collect()
    assert [event.node for event in job.recorded(journal.Isolated)] == [1, 2]


def test_a_second_node_that_breaks_before_the_first_step_is_isolated_too() -> None:
    """If a second node fails before the first step, its pod moves and its host is isolated."""
    job = untouched(msgspec.structs.replace(PODS, approve=()), nodes=3)
    job.lose(1)
    job.lose(2)
    assert job.phase is Phase.RESTARTING
    assert strategies(job) == [POD, POD]
    assert [event.node for event in job.recorded(journal.Isolated)] == [1, 2]


# ---- a reset


def test_a_reset_that_fails_isolates_also_where_no_code_is_known() -> None:
    """A failed reset isolates the host, also without a fault code.

    DLRover's exit status 201 reports a failed driver.
    """
    job = trained(5, nodes=2, policy=Policy(max_restarts=3))
    job.exits(3, code=201, finished=5)
    assert reset_helps(job) == [(3,)]
    job.unstarted.clear()
    job.say(1, p.DeviceResetFailed(rank=3, error="it does not answer"))
    assert strategies(job) == [IN_PLACE, RECOVER]
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-2"]


@pytest.mark.parametrize("session", [True, False])
def test_a_reset_that_could_not_be_tried_shows_no_sick_device(session: bool) -> None:
    """The rank starts without the reset, the reason is recorded, and no host is isolated.

    The code is still the same one, so it is not answered again.
    """
    job = trained(5, nodes=2) if session else untouched(AUTO, nodes=2)
    ascend(job, RESET)
    job.killed()
    if not session:
        job.store_up()
    job.say(0, p.DeviceResetFailed(rank=1, error="Insufficient Permissions", tried=False))
    job.spawned()
    ascend(job, RESET)
    assert strategies(job) == [IN_PLACE if session else RESTART]
    assert job.recorded(journal.Isolated) == []
    assert job.last(journal.ResetSkipped).in_words() == (
        "incident 1: rank 1 starts without a reset of its device, because Insufficient Permissions"
    )
    assert job.machine.fleet.resetting == frozenset()


def test_a_job_with_one_machine_does_not_move_onto_it() -> None:
    """A device that must be isolated ends the job: another agent would run on the same machine."""
    job = trained(5, policy=Policy(max_restarts=3), keeps_off=KeepsOff.ONE_HOST)
    ascend(job, SEPARATE)
    assert strategies(job) == [Strategy.FAIL]
    assert "the job has no other machine" in job.last(journal.Decided).reason
    assert job.recorded(journal.NodeWanted) == []


def test_the_only_machine_is_not_condemned_by_the_loss_of_its_agent() -> None:
    """ModelArts isolates a lost node. With one machine the whole job is placed again there."""
    job = untouched(msgspec.structs.replace(AUTO, unconditional=True), keeps_off=KeepsOff.ONE_HOST)
    job.lose(0)
    assert strategies(job) == [Strategy.RESCHEDULE_JOB]
    assert job.recorded(journal.Isolated) == []


def test_what_is_reported_after_a_reset_is_news() -> None:
    """A fault code after a reset counts as new without a report of its end.

    The third one within a day isolates the host.
    """
    job = trained(5, nodes=2)
    answers = []
    for step in (6, 7, 8):
        ascend(job, RESET, node=1)
        answers.append(strategies(job)[-1])
        if step < 8:
            ascend(job, RESET, node=1)  # repeated during the recovery
            job.killed()
            job.spawned()
            job.form(5)
            job.step(step)
            pass_time(job, 3600)
    assert answers == [IN_PLACE, IN_PLACE, RECOVER]
    assert [each.health_event.gone for each in job.recorded(journal.HealthEventSeen)] == [
        False, True, False, True, False,
    ]  # fmt: skip


def test_what_a_job_may_be_told_of_is_no_more_than_its_own() -> None:
    """A health event of a node outside the job is refused and does not delay a decision."""
    job = untouched(AUTO)
    assert job.machine.health.on_health_event(
        HealthEvent(source=EventSource.XID, what="92", node=4), job.now
    )
    job.exits(0, code=1)
    assert strategies(job) == [Strategy.FAIL]
