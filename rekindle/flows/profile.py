"""Define the profile flow: switch the light profiling of a training run from the UI."""

# Annotations stay values in this module, as in `rekindle.flows.train`.

from typing import Any, Literal
from uuid import UUID

from prefect import flow, runtime
from prefect.client.orchestration import get_client

from rekindle.errors import JobError
from rekindle.profiling.switch import ProfilingOrder
from rekindle.tasks import job_access as jobs
from rekindle.tasks.identity import recorded_job
from rekindle.tasks.launch import describe_elsewhere
from rekindle.tasks.profile import report_profile

Kind = Literal["communication", "step", "save-checkpoint", "forward", "data-loader"]


@flow(name="profile", persist_result=False)
def profile(
    flow_run_id: UUID,
    on: bool = True,
    kinds: list[Kind] = [],  # noqa: B006
) -> list[dict[str, Any]]:
    """Switch light profiling of a flow run's job, and show the results of its records so far.

    flow_run_id: of the training run. kinds: an empty list means the four cheap kinds for on, and
    all kinds for off. Raises JobError: the job does not run, or these kinds cannot be off alone.
    """
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(flow_run_id)
    job_id = recorded_job(flow_run)
    describe_elsewhere(flow_run, job_id)
    endpoint = jobs.coordinator_of(job_id)
    if endpoint is None:
        raise JobError(f"job {job_id} of flow run {flow_run.name} does not run")
    order = ProfilingOrder(on=on, kinds=tuple(kinds), by=f"flow run {runtime.flow_run.name}")
    jobs.client_of(job_id, endpoint).profile(order)
    return report_profile(job_id)
