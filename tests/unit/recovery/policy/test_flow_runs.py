"""Decisions about complete flow runs and task runs, from the ends that Prefect reports."""

from __future__ import annotations

import pytest

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.policy.flow_runs import AGAIN, RunEnd, decide_run, fault_of
from rekindle.recovery.policy.policy import ALLOWABLE, Policy, Strategy

TABLES = Tables.load()


def raised(text: str, at: float = 0.0) -> RunEnd:
    """Return the end of a flow run that raised an exception."""
    return RunEnd(message=f"Flow run encountered an exception: {text}", at=at)


def crashed(text: str, at: float = 0.0) -> RunEnd:
    """Return the end of a run that Prefect reports as crashed."""
    return RunEnd(message=text, crashed=True, at=at)


KILLED = crashed("Process exited with status code: -9. This may be due to memory.")
TERMINATED = crashed("Execution was aborted by a termination signal.")
WRONG = raised("ValueError: shard 7 is damaged")
ECC = raised("RuntimeError: CUDA error: uncorrectable ECC error encountered")
ODD = raised("mymodule.OddError: who knows")


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (KILLED, FaultKind.PROCESS),
        (crashed("Flow run process exited with non-zero status code 137."), FaultKind.PROCESS),
        (crashed("Process exited with status code: 77"), FaultKind.USER_CODE),
        (TERMINATED, FaultKind.EVICTION),
        (crashed("Process exited with status code: -15. "), FaultKind.EVICTION),
        (crashed("Process exited with status code: 143"), FaultKind.EVICTION),
        (crashed("Execution was cancelled by the runtime environment."), FaultKind.PROCESS),
        (crashed("Request to http://127.0.0.1:4200/api failed: ReadTimeout."), FaultKind.TRANSIENT),
        (crashed("Flow run could not start: [Errno 2] no such file"), FaultKind.SCHEDULING),
        (crashed("Execution was aborted by Python system exit call."), FaultKind.USER_CODE),
        (crashed("Flow run heartbeat timed out"), FaultKind.UNKNOWN),
        (WRONG, FaultKind.USER_CODE),
        (RunEnd(message="Task run encountered an exception ValueError: x"), FaultKind.USER_CODE),
        (RunEnd(message="ValueError: x"), FaultKind.USER_CODE),
        (ECC, FaultKind.DEVICE_MEMORY),
        (raised("torch.OutOfMemoryError: CUDA out of memory. Tried to"), FaultKind.DEVICE_OOM),
        (ODD, FaultKind.UNKNOWN),
    ],
)
def test_a_message_becomes_a_fault(end: RunEnd, kind: FaultKind) -> None:
    """The kind of fault follows from Prefect's message, and from the tables for an exception."""
    assert fault_of(end, TABLES).kind is kind


BOTH = Policy(max_restarts=1, max_reschedules=2)
NO_RESTART = Policy(max_restarts=0)


def decide(policy: Policy, *ends: RunEnd) -> Strategy:
    """Return the decision about the last of these ends."""
    return decide_run(policy, ends, TABLES).strategy


def test_budgets_are_spent_in_the_order_of_the_ladder() -> None:
    """The run uses its restarts first, then its reschedules. Then it stays as it ended."""
    found = [decide(BOTH, *[KILLED] * count) for count in (1, 2, 3, 4)]
    assert found == [
        Strategy.RESTART,
        Strategy.RESCHEDULE_JOB,
        Strategy.RESCHEDULE_JOB,
        Strategy.FAIL,
    ]
    reason = decide_run(BOTH, [KILLED] * 4, TABLES).reason
    assert "1 of 1 restarts are used; 2 of 2 reschedules are used" in reason


def test_without_a_budget_a_run_is_left_as_it_ended() -> None:
    """A policy without restarts and reschedules repeats no run."""
    assert decide(NO_RESTART, KILLED) is Strategy.FAIL


def test_the_default_policy_repeats_a_run_three_times() -> None:
    """A Policy() allows as many restarts of a run as of the ranks of a job."""
    found = [decide(Policy(), *[KILLED] * count) for count in (1, 3, 4)]
    assert found == [Strategy.RESTART, Strategy.RESTART, Strategy.FAIL]


def test_an_eviction_uses_up_no_budget() -> None:
    """A run that is evicted continues on another node, however often, and uses no budget."""
    assert decide(NO_RESTART, *[TERMINATED] * 50) is Strategy.RESCHEDULE_JOB
    mixed = [KILLED, *[TERMINATED] * 50, KILLED]
    assert decide(Policy(max_restarts=0, max_reschedules=2), *mixed) is Strategy.RESCHEDULE_JOB


def test_the_same_error_of_the_script_twice_is_the_scripts() -> None:
    """The same error again fails the run. Another error does not."""
    policy = Policy(max_restarts=5)
    assert decide(policy, WRONG) is Strategy.RESTART
    assert decide(policy, WRONG, raised("KeyError: 'loss'")) is Strategy.RESTART
    again = decide_run(policy, [WRONG, WRONG], TABLES)
    assert again.strategy is Strategy.FAIL
    assert "the script is the likely cause" in again.reason


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (raised("rekindle.errors.JobFailedError: job a failed"), "ended by its own policy"),
        (raised("LeaseHeldError: flow run calm-owl (1) steers this job"), "another flow run"),
        (raised("HopelessError: pod a cannot start: InvalidImageName"), "cannot run as described"),
        (raised("OtherJobError: job a exists with another description"), "another job"),
        (RunEnd(message="The job cannot start: job.nodes: give 1"), "job.nodes"),
        (RunEnd(message="Validation of flow parameters failed with error: x"), "Validation"),
        (crashed("Execution was aborted by an interrupt signal."), "a person"),
    ],
)
def test_what_another_run_cannot_change_is_final(end: RunEnd, text: str) -> None:
    """Some ends are final, whatever the budget, and the reason states the cause."""
    decision = decide_run(Policy(max_restarts=9, max_reschedules=9), [end], TABLES)
    assert decision.strategy is Strategy.FAIL
    assert text in decision.reason


@pytest.mark.parametrize("error", ["UsageError: no such script", "JobError: process 1 died"])
def test_a_job_that_cannot_be_started_or_steered_is_tried_once_more(error: str) -> None:
    """If a job cannot start or be controlled, its flow runs one more time.

    A second such end fails the run, whatever process the error names.
    """
    policy = Policy(max_restarts=0, max_reschedules=9)
    first, second = (raised(f"rekindle.errors.{text}") for text in (error, f"{error} again"))
    assert decide(policy, first) is Strategy.RESCHEDULE_JOB
    assert decide(policy, first, second) is Strategy.FAIL


def test_a_sick_device_has_the_run_placed_anew() -> None:
    """A fault that may pass causes a restart. A lost device moves the run to another node."""
    lost = raised("RuntimeError: GPU has fallen off the bus.")
    assert decide(Policy(max_restarts=1), ECC) is Strategy.RESTART
    assert decide(Policy(max_restarts=0, max_reschedules=1), lost) is (
        Strategy.RESCHEDULE_JOB_ISOLATED
    )


def test_what_the_policy_does_not_allow_is_not_done() -> None:
    """Only the strategies of the policy are used. A strategy that needs approval is marked."""
    only = Policy(strategies=(Strategy.RESCHEDULE_JOB,), max_restarts=9, max_reschedules=1)
    assert decide(only, KILLED) is Strategy.RESCHEDULE_JOB
    asks = Policy(max_restarts=1, approve=(Strategy.RESTART,))
    assert decide_run(asks, [KILLED], TABLES).approval


def test_a_run_that_was_run_again_counts_under_a_policy_that_has_changed() -> None:
    """A repetition that an earlier policy allowed counts as a reschedule under the new policy."""
    assert decide(Policy(max_restarts=0, max_reschedules=1), KILLED, KILLED) is Strategy.FAIL
    narrow = Policy(strategies=tuple(s for s in ALLOWABLE if s not in AGAIN))
    assert decide(narrow, KILLED, KILLED) is Strategy.FAIL
