"""Define the rescue flow, which an automation runs if a flow run may have ended without hooks.

Hooks run in the flow's process or in its runner's process. If both have ended, or if a person
cancels a run that waits for a rerun, only the server knows of it.
"""

# Annotations stay values in this module, as in `rekindle.flows.train`.

from uuid import UUID

import msgspec
from prefect import flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.events import emit_event
from prefect.states import Cancelled

from rekindle import names
from rekindle.recovery.policy.policy import Policy
from rekindle.tasks.hooks.cancellation import OF_FLOW_PROCESS, stop_abandoned
from rekindle.tasks.hooks.rerun import run_again
from rekindle.tasks.prefect_api.run_states import history, replace

MOST = OF_FLOW_PROCESS.max_reschedules


@flow(name="rescue", persist_result=False)
def rescue(flow_run_id: UUID, most: int = MOST) -> bool:
    """Schedule a crashed flow run again, up to `most` times; return whether that was done.

    The rerun adopts the job, which has continued. The limit includes the runs that hooks have
    scheduled, until a person starts the run again; automations have no limit. The flow stops the
    job of a flow run that was cancelled or suspended, or that has failed, unless a process of that
    run does so.
    """
    policy = msgspec.structs.replace(
        OF_FLOW_PROCESS, max_reschedules=most, max_reschedules_in_row=most
    )
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(flow_run_id)
        again = _rescue(client, flow_run, policy)
        _tell_done(flow_run, client.read_flow(flow_run.flow_id).name)
    return again


def _rescue(client: SyncPrefectClient, flow_run: FlowRun, policy: Policy) -> bool:
    log = get_run_logger()
    states = history(client, flow_run.id)
    if states and stop_abandoned(flow_run, states[-1], log):
        if states[-1].is_cancelling() and len(states) > 1 and states[-2].is_scheduled():
            # It had no process, so only this flow can set the state Cancelled.
            replace(client, flow_run.id, Cancelled(), allowed=State.is_cancelling, force=True)
        return False
    if flow_run.state is None or not flow_run.state.is_crashed():
        log.info(
            "Flow run %s is %s; the rescue flow has nothing to do",
            flow_run.name,
            flow_run.state_name,
        )
        return False
    return run_again(policy, flow_run, flow_run.state, log)


def _tell_done(flow_run: FlowRun, flow_name: str) -> None:
    """Emit the event for which the automation waits."""
    related = {
        "prefect.resource.id": f"prefect.flow.{flow_run.flow_id}",
        "prefect.resource.role": "flow",
        "prefect.resource.name": flow_name,
    }
    resource = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}
    emit_event(names.EVENT_RESCUE_DONE, resource=resource, related=[related])
