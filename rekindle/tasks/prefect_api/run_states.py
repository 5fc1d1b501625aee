"""Read what the state of a flow run means for its job, and write states of flow runs.

| state of the flow run | its job |
|---|---|
| deleted | stops |
| suspended | stops |
| cancelling, cancelled | stops, unless a runner that shuts down has cancelled it |
| failed, completed | stops |
| any other, also crashed | continues |

Nothing here replaces a state that a person may have set. Prefect has no conditional write, so
`replace` looks at the history after its write.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, TypeAlias
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import PrefectException

from rekindle.errors import LeaseHeldError, OtherJobError, OtherVersionError, RecordLostError
from rekindle.tasks.prefect_api import Log

AnyState: TypeAlias = "State[Any]"

# A runner that stops cancels its flow runs with this message. No user wants the job to end, so the
# job continues, and a rerun of the flow run adopts it.
RUNNER_SHUTS_DOWN = "Runner is shutting down."

# Prefect gives this name to a failed run that has reached its time limit.
TIMED_OUT = "TimedOut"

# The name of the state of a run that has not trained, because a newer one is due.
SKIPPED = "Skipped"
# Types of the states of a run that has trained, trains or will train.
_TRAINS = [
    StateType.SCHEDULED,
    StateType.PENDING,
    StateType.RUNNING,
    StateType.PAUSED,
    StateType.COMPLETED,
]

_REFUSALS = tuple(
    each.__name__ for each in (LeaseHeldError, OtherJobError, OtherVersionError, RecordLostError)
)


def is_suspended(state: AnyState) -> bool:
    """Return whether a person has suspended the run. A run that waits for approval is not."""
    return state.is_paused() and bool(state.state_details.pause_reschedule)


def is_decided(state: AnyState) -> bool:
    """Return whether the run has ended, ends, or is suspended. Rekindle keeps such a state."""
    return state.is_final() or state.is_cancelling() or is_suspended(state)


def demand(state: AnyState | None) -> str:
    """Return what of the flow run stops its job, such as `the cancellation`; empty: nothing.

    None: the flow run was deleted. A crash is an accident of a process, and stops nothing.
    """
    if state is None:
        return "the deletion"
    if is_suspended(state):
        return "the suspension"
    if state.is_cancelling() or state.is_cancelled():
        return "" if state.message == RUNNER_SHUTS_DOWN else "the cancellation"
    if state.name == TIMED_OUT:
        return "the time limit"
    if state.is_failed() or state.is_completed():
        return f"the state {state.name}"
    return ""


def is_refused(state: AnyState) -> bool:
    """Return whether the run has failed because its job is not its own, or has ended."""
    return state.is_failed() and any(name in (state.message or "") for name in _REFUSALS)


def is_writable(state: AnyState) -> bool:
    """Return whether the process of a run may name its state. Not before a rerun, or after an end.

    A run that waits for approval is paused, and may continue.
    """
    return state.is_running() or (state.is_paused() and not is_suspended(state))


def replace(
    client: SyncPrefectClient,
    flow_run_id: UUID,
    new: AnyState,
    *,
    allowed: Callable[[AnyState], bool] = is_writable,
    force: bool = False,
) -> str:
    """Set the state of a flow run, if the present state is allowed; return why not, or "".

    If a decided state came between the reading and the writing, this function sets it again.
    force: Prefect's rules do not apply.
    """
    before = client.read_flow_run(flow_run_id).state
    if before is None or not allowed(before):
        return f"the run has the state {before.name if before else None}"
    result = client.set_flow_run_state(flow_run_id, new, force=force)
    if result.status is not SetStateStatus.ACCEPT or result.state is None:
        return f"Prefect refuses it: {result.details}"
    overwritten = _overwritten(client, flow_run_id, before, result.state)
    if overwritten is None:
        return ""
    client.set_flow_run_state(flow_run_id, overwritten, force=True)
    return f"the run has the state {overwritten.name}"


def name_state(flow_run_id: UUID, state: AnyState, log: Log) -> None:
    """Set the state of a run whose process lives, if its present state allows it."""
    try:
        with get_client(sync_client=True) as client:
            refused = replace(client, flow_run_id, state)
    except (httpx.HTTPError, PrefectException) as error:
        log.warning("Rekindle cannot set the state %s: %r", state.name, error)
    else:
        log.debug("State %s: %s", state.name, refused or "set")


def history(client: SyncPrefectClient, flow_run_id: UUID) -> list[AnyState]:
    """Return all states of a flow run, in their order."""
    return sorted(client.read_flow_run_states(flow_run_id), key=lambda one: one.timestamp)


def superseded_by(client: SyncPrefectClient, flow_run: FlowRun) -> FlowRun | None:
    """Return the newest run of the deployment that is due after this one, or None.

    None also if a person runs a skipped run again. A run that has failed or was cancelled is not a
    newer one.
    """
    due = flow_run.expected_start_time
    if flow_run.deployment_id is None or due is None:
        return None
    if any(state.name == SKIPPED for state in history(client, flow_run.id)):
        return None
    now = datetime.now(timezone.utc)
    found = client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[flow_run.deployment_id])),
        flow_run_filter=FlowRunFilter(
            expected_start_time=FlowRunFilterExpectedStartTime(after_=due, before_=now),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_TRAINS)),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
    )
    return next((run for run in found if (run.expected_start_time or due) > due), None)


def _overwritten(
    client: SyncPrefectClient, flow_run_id: UUID, before: AnyState, own: AnyState
) -> AnyState | None:
    """Return the decided state that `own` has replaced instead of `before`, or None."""
    states = history(client, flow_run_id)
    known = [state.id for state in states]
    if known[-1] != own.id or before.id not in known:
        return None  # another state has replaced it
    between = states[known.index(before.id) + 1 : -1]
    return between[-1] if between and is_decided(between[-1]) else None
