"""What a cancelled flow run does to its job; runs in the flow's process or in its runner's."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger

from rekindle.blocks.job import DEFAULT_NAME
from rekindle.engines.client import JobClient
from rekindle.errors import JobError
from rekindle.tasks import jobs

# A runner that is stopped cancels its flow runs with these words. Nobody wanted the job to end, so
# it goes on, and a rerun of the flow run adopts it.
RUNNER_SHUTS_DOWN = "Runner is shutting down."


def stop_job(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Stop the job of a flow run that was cancelled."""
    log = flow_run_logger(flow_run, flow)
    name = flow_run.parameters.get("job", {}).get("name", DEFAULT_NAME)
    job_id = jobs.job_id_of(flow_run.id, name)
    if state.message == RUNNER_SHUTS_DOWN:
        log.info("The runner shuts down; job %s goes on. Retry this flow run to adopt it", job_id)
        return
    endpoint = jobs.coordinator_of(job_id)
    if endpoint is None:
        log.info("Job %s does not run; there is nothing to stop", job_id)
        return
    client = JobClient(endpoint, jobs.directory_of(job_id).secret())
    holder = f"cancellation of flow run {flow_run.name} ({flow_run.id})"
    try:
        with client.steer(holder=holder) as lease:
            client.stop(token=lease.token, reason=f"flow run {flow_run.name} was cancelled")
    except JobError:
        log.exception("Job %s could not be stopped", job_id)
        raise
    log.info("Job %s is being stopped; retry this flow run to resume it", job_id)
