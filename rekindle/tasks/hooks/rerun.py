"""Provide Prefect's hooks for any flow and task: a policy decides about a failed or crashed run.

    @flow(**recovery_hooks(Policy(max_reschedules=3)))

    @task(retries=5, retry_condition_fn=retry_condition(Policy(max_restarts=3)))

Prefect ignores errors of a hook. It runs no hook if only its server knows that a run has ended. The
rescue flow handles that case.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict
from uuid import UUID

import msgspec
from prefect import Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.flows import Flow, FlowStateHook
from prefect.logging.loggers import flow_run_logger, task_run_logger
from prefect.states import Scheduled

from rekindle.recovery.faults.tables.tables import shipped_tables
from rekindle.recovery.policy.decide import Decision
from rekindle.recovery.policy.flow_runs import AGAIN, RunEnd, decide_run
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.reporting.run_state import RESCHEDULING
from rekindle.tasks.prefect_api import Log
from rekindle.tasks.prefect_api.run_states import (
    TIMED_OUT,
    history,
    is_suspended,
    replace,
)
from rekindle.waiting import until

# The message of Prefect's runner. A worker reports the same end a moment after the hooks.
_OF_RUNNER = "Process exited with status code"
_ENDS_S = 30.0  # the process that runs the hooks ends by then
_REPORTS_S = 3.0  # and the worker's report arrives this much later

RetryCondition = Callable[[Task[..., Any], TaskRun, State[Any]], bool]


class FlowHooks(TypedDict):
    """The arguments that `recovery_hooks` gives to `@flow`."""

    on_failure: list[FlowStateHook[..., Any]]
    on_crashed: list[FlowStateHook[..., Any]]


def recovery_hooks(policy: Policy) -> FlowHooks:
    """Return hooks for `@flow` that schedule a flow run again if the policy allows it.

    Each flow run has the budgets of the policy (`max_restarts`, `max_reschedules`). They start
    again when a person reruns it. Prefect can only schedule a run of a deployment. A cancelled run
    stays cancelled.
    """

    def hook(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        of_runner = state.is_crashed() and (state.message or "").startswith(_OF_RUNNER)
        if of_runner and _of_process_worker(flow_run.id):
            _run_again_later(policy, flow_run)
            return
        run_again(policy, flow_run, state, flow_run_logger(flow_run, flow))

    return {"on_failure": [hook], "on_crashed": [hook]}


def retry_condition(policy: Policy) -> RetryCondition:
    """Return a condition for `@task` that allows a retry while the policy has a restart left.

    Prefect calls it at most as many times as the task's `retries` allow.
    """
    # Prefect retries a task run only in the process that ran it.
    ends: dict[UUID, list[RunEnd]] = {}

    def may_retry(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
        end = RunEnd(message=_message(state), at=state.timestamp.timestamp())
        earlier = ends.setdefault(task_run.id, [])
        earlier.append(end)
        decision = decide_run(policy, earlier, shipped_tables())
        again = decision.strategy is Strategy.RESTART and not decision.approval
        if not again:
            del ends[task_run.id]
        task_run_logger(task_run, task).warning("%s", _in_words(decision, again))
        return again

    return may_retry


def ends_of(states: Iterable[State[Any]]) -> list[RunEnd]:
    """Return the ends of a flow run since a person last started it. states: in their order."""
    ends: list[RunEnd] = []
    over = False
    for state in states:
        if state.type in (StateType.FAILED, StateType.CRASHED):
            if over and ends:
                ends.pop()  # two sources reported the same end
            crashed = state.type is StateType.CRASHED
            at = state.timestamp.timestamp()
            ends.append(RunEnd(message=state.message or "", crashed=crashed, at=at))
        elif state.is_final() or (over and _by_hand(state)):
            ends.clear()
        over = state.is_final()
    return ends


def _by_hand(state: State[Any]) -> bool:
    """Return whether a person starts the run again.

    A continuing process also sets states with names.
    """
    return state.is_scheduled() and state.name != RESCHEDULING


def run_again(policy: Policy, flow_run: FlowRun, state: State[Any], log: Log) -> bool:
    """Schedule a flow run again, if the policy allows it; return whether that was done.

    state: the final state of the run. If the run has another state by now, another process has
    acted.
    """

    def unchanged(now: State[Any]) -> bool:
        return now.id == state.id

    with get_client(sync_client=True) as client:
        # read again, because the hook's flow run may be out of date
        states = history(client, flow_run.id)
        if states[-1].id != state.id:
            log.info("This run now has state %s; Rekindle does not change it", states[-1].name)
            return False
        if len(states) > 1 and states[-2].is_cancelling():
            log.info("A user is cancelling this run; Rekindle does not change it")
            return False
        if len(states) > 1 and is_suspended(states[-2]):
            log.info("A user has suspended this run; it stays suspended")
            replace(client, flow_run.id, states[-2], allowed=unchanged, force=True)
            return False
        if state.name == TIMED_OUT:
            log.warning("Rekindle does not restart this run: it has reached its time limit")
            return False
        decision = decide_run(policy, ends_of(states), shipped_tables())
        again = decision.strategy in AGAIN and not decision.approval
        log.warning("%s", _in_words(decision, again))
        if not again:
            return False
        if flow_run.deployment_id is None:
            log.warning("The run has no deployment, so only a person can restart it")
            return False
        waits: State[Any] = Scheduled(name=RESCHEDULING, message=_in_words(decision, again))
        refused = replace(client, flow_run.id, waits, allowed=unchanged)
        if refused:
            log.warning("Rekindle does not restart this run: %s", refused)
            return False
    return True


def _of_process_worker(flow_run_id: UUID) -> bool:
    """Return whether a process worker has started the run. Only such a worker reports its end."""
    with get_client(sync_client=True) as client:
        pool = client.read_flow_run(flow_run_id).work_pool_name  # the hook's flow run lacks it
        return pool is not None and client.read_work_pool(pool).type == "process"


def _run_again_later(policy: Policy, flow_run: FlowRun) -> None:
    """Start a process that schedules the run again after the report of the worker.

    The worker waits for the hooks, and then reports that the run has crashed. A run that is
    scheduled before that report crashes once more.
    """
    given = [str(flow_run.id), str(os.getppid()), msgspec.json.encode(policy).decode()]
    subprocess.Popen(
        [sys.executable, "-m", "rekindle.tasks.hooks.rerun", *given],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a worker that ends takes its own group with it
    )


def _run_again_after_report(flow_run_id: UUID, runner: int, policy: Policy) -> None:
    """Wait for the report of the worker, and schedule the run again if the policy allows it.

    runner: the process that runs the hooks. The worker reports after its end.
    """
    until(lambda: not Path(f"/proc/{runner}").exists(), _ENDS_S, 0.1)
    time.sleep(_REPORTS_S)  # no change shows that the report has arrived
    with get_client(sync_client=True) as client:
        flow_run, state = client.read_flow_run(flow_run_id), history(client, flow_run_id)[-1]
    log = flow_run_logger(flow_run)
    if state.is_crashed():
        run_again(policy, flow_run, state, log)
    else:
        log.info("This run now has state %s; Rekindle does not change it", state.name)


def _in_words(decision: Decision, again: bool) -> str:
    if again:
        return f"Rekindle restarts this run: {decision.reason}"
    waits = (
        "a restart needs a person's approval, so retry the run by hand: "
        if decision.approval
        else ""
    )
    return f"Rekindle does not restart this run: {waits}{decision.reason}"


def _message(state: State[Any]) -> str:
    """Return the message of the exception itself; the state's message has another form."""
    if isinstance(state.data, BaseException):
        return "".join(traceback.format_exception_only(state.data)).strip()
    return state.message or ""


if __name__ == "__main__":
    _run_again_after_report(
        UUID(sys.argv[1]), int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Policy)
    )
