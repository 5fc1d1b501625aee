"""Make the automations that watch the runs of Rekindle's flows.

Flow runs send heartbeats, by Prefect's default every 180 s. PREFECT_FLOWS_HEARTBEAT_FREQUENCY (at
least 30) sets another interval where they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from rekindle import names

# A run may miss two heartbeats, and a short time more, before it counts as crashed.
MISSED_HEARTBEATS = 2.5
SILENT = "Crashed by Rekindle: no heartbeat"
STUCK = "Crashed by Rekindle: it did not begin"
_PREFIX = "Rekindle: "
_RUNS = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
_ENDS = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}
_SUSPENDED = "prefect.flow-run.Suspended"  # without a process, and without heartbeats
# States of a run whose process, hooks and runner may have ended.
_UNSEEN = {
    f"prefect.flow-run.{name}"
    for name in ("Crashed", "Cancelling", "Cancelled", "Suspended", "Failed", "TimedOut")
}
_PENDING = {f"prefect.flow-run.{name}" for name in ("Pending", "InfrastructurePending")}
_BEGUN = {
    f"prefect.flow-run.{name}"
    for name in ("Running", "Scheduled", "AwaitingRetry", "Rescheduling", "Resuming", "Cancelling")
}


def crash_silent_runs(flows: Sequence[str], heartbeat_s: float) -> AutomationCore:
    """Return an automation that marks a flow run as crashed if its process and runner have ended.

    flows: names of the flows. heartbeat_s: seconds between two heartbeats of their runs.
    """
    return AutomationCore(
        name=f"{_PREFIX}crash silent flow runs",
        description="Prefect marks a flow run as crashed if it sends no heartbeat.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", _SUSPENDED, *_ENDS},
            match=_RUNS,
            match_related=_of(flows),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=heartbeat_s * MISSED_HEARTBEATS),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=SILENT)],
    )


def crash_pending_runs(flows: Sequence[str], pending_s: float) -> AutomationCore:
    """Return an automation that marks a flow run as crashed if its worker died before it began.

    pending_s: seconds that the start of a process or pod may take.
    """
    return AutomationCore(
        name=f"{_PREFIX}crash pending flow runs",
        description="Prefect marks a flow run as crashed if it stays Pending.",
        trigger=EventTrigger(
            after=_PENDING,
            expect=_BEGUN | _ENDS,
            match=_RUNS,
            match_related=_of(flows),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=pending_s),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=STUCK)],
    )


def rescue_runs(rescue: UUID, flows: Sequence[str]) -> AutomationCore:
    """Return an automation that runs the rescue flow if a flow run may have ended without hooks.

    rescue: the deployment of the rescue flow. flows: names of the flows whose runs it rescues.
    """
    return AutomationCore(
        name=f"{_PREFIX}rescue flow runs",
        description=f"The rescue flow restarts a crashed run of {', '.join(flows)}, which then "
        "adopts its job. It stops the job of a run that has ended for good, or is suspended.",
        trigger=EventTrigger(
            expect=_UNSEEN,
            match=_RUNS,
            match_related=_of(flows),
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[_run(rescue)],
    )


def rescue_runs_again(rescue: UUID, flows: Sequence[str], rescued_s: float) -> AutomationCore:
    """Return an automation that runs the rescue flow again if it has not run to its end.

    Prefect does not repeat an action that fails. rescued_s: seconds that a rescue may take.
    """
    return AutomationCore(
        name=f"{_PREFIX}rescue flow runs again",
        description="Prefect runs the rescue flow again if it has not run to its end.",
        trigger=EventTrigger(
            after=_UNSEEN,
            expect={names.EVENT_RESCUE_DONE},
            match=_RUNS,
            match_related=_of(flows),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=rescued_s),
        ),
        actions=[_run(rescue)],
    )


def _run(rescue: UUID) -> RunDeployment:
    flow_run = {"__prefect_kind": "jinja", "template": "{{ event.resource.id.split('.')[-1] }}"}
    return RunDeployment(deployment_id=rescue, parameters={"flow_run_id": flow_run})


def _of(flows: Sequence[str]) -> ResourceSpecification:
    return ResourceSpecification(
        {"prefect.resource.role": "flow", "prefect.resource.name": list(flows)}
    )


def tell_of_incidents(block: UUID) -> AutomationCore:
    """Return an automation that sends a notification for each incident.

    block: the document id of a notification block.
    """
    return AutomationCore(
        name=f"{_PREFIX}tell of incidents",
        description="Prefect sends a notification for each incident of a training job.",
        trigger=EventTrigger(
            expect={"rekindle.incident.detected"},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            SendNotification(
                block_document_id=block,
                subject="Incident of {{ event.resource.id }}",
                body="{{ event.payload.message }}",
            )
        ],
    )
