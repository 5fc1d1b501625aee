"""What the end of a flow run does to its job; hooks run in the flow's process or its runner's.

| the flow run | the job | the flow run then |
|---|---|---|
| fails, since its job has ended | has ended | stays failed |
| fails, since the job cannot be started or steered | as it was | is run again, once |
| fails by anything else | goes on | is run again, and adopts it |
| crashes: its process was ended by a signal, or exited | goes on | is run again, and adopts it |
| is cancelled by a person | is stopped, with a final checkpoint | stays cancelled |
| is cancelled, since its runner shuts down | goes on | waits for a person's retry |
| crashes with its runner, or in the server's eyes alone | goes on | the same, or an automation |
"""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger

from rekindle.blocks.job import DEFAULT_NAME
from rekindle.errors import RekindleError
from rekindle.job.spec import Endpoint
from rekindle.recovery.journal import attempts
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.tasks import job_access as jobs
from rekindle.tasks.launch import describe_elsewhere
from rekindle.tasks.prefect_api import Log
from rekindle.waiting import until

# A runner that is stopped cancels its flow runs with these words. Nobody wanted the job to end, so
# it goes on, and a rerun of the flow run adopts it.
RUNNER_SHUTS_DOWN = "Runner is shutting down."

_GATHER_S = 10.0  # for agents that have lost their coordinator to come to another one

# How often the train flow's own process may break before a person has to look. It costs the job
# nothing; evictions do not count, as nowhere.
OF_FLOW_PROCESS = Policy(
    strategies=(Strategy.RESCHEDULE_JOB_ISOLATED, Strategy.RESCHEDULE_JOB),
    max_reschedules=30,
    max_reschedules_in_row=30,
)


def stop_job(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Stop the job of a flow run that was cancelled."""
    _stop(flow_run, state, flow_run_logger(flow_run, flow))


def stop_abandoned(flow_run: FlowRun, state: State[Any], log: Log) -> bool:
    """Stop the job of a flow run that was cancelled and has no process that could; say whether.

    A run that is cancelled while it waits to be run again has none, and none of its hooks is run.
    """
    if not (state.is_cancelled() or state.is_cancelling()):
        return False
    job_id = job_of(flow_run)
    describe_elsewhere(flow_run, job_id)
    endpoint = jobs.coordinator_of(job_id)
    client = jobs.client_of(job_id, endpoint) if endpoint else None
    if client is not None and (holder := client.status().holder):
        log.info("%s steers job %s, and stops it", holder, job_id)
        return False
    _stop(flow_run, state, log)
    return True


def job_of(flow_run: FlowRun) -> str:
    """Return the job of a flow run, whether or not there is one."""
    name = flow_run.parameters.get("job", {}).get("name", DEFAULT_NAME)
    return jobs.job_id_of(jobs.lasting_id(flow_run), name)


def _stop(flow_run: FlowRun, state: State[Any], log: Log) -> None:
    job_id = job_of(flow_run)
    if state.message == RUNNER_SHUTS_DOWN:
        log.info("The runner shuts down; job %s goes on. Retry this flow run to adopt it", job_id)
        return
    try:
        describe_elsewhere(flow_run, job_id)
        endpoint = _coordinator(job_id)
        if endpoint is None:
            log.info("Job %s does not run; there is nothing to stop", job_id)
            if jobs.directory_of(job_id).pods.exists():  # a launch, or a release, was cut off
                _release(job_id, log)
            return
        # Not under the lease: the process that holds it may not be quite dead yet, and a person who
        # cancels does not ask who steers.
        client = jobs.client_of(job_id, endpoint)
        client.stop(by=f"the cancellation of flow run {flow_run.name} ({flow_run.id})")
    except (RekindleError, ValueError):
        log.exception("Job %s could not be stopped", job_id)
        raise
    log.info("Job %s is being stopped; retry this flow run to resume it", job_id)
    if jobs.directory_of(job_id).pods.exists():
        _remove_from_cluster(job_id, log)


def _remove_from_cluster(job_id: str, log: Log) -> None:
    """Remove what a job that was stopped has left there: no flow process will."""
    limit_s = _GATHER_S + jobs.directory_of(job_id).spec().policy.dump_timeout_s
    if until(lambda: attempts.end_of(jobs.history_of(job_id)) is not None, limit_s, 0.5):
        _release(job_id, log)
    else:
        log.warning("Job %s has not ended within %g s; its pods are left", job_id, limit_s)


def _release(job_id: str, log: Log) -> None:
    if jobs.release(job_id, log):
        log.info("Nothing of job %s is left in the cluster", job_id)


def _coordinator(job_id: str) -> Endpoint | None:
    """Return who can stop the job: another coordinator, where ranks train on without one."""
    history = jobs.history_of(job_id)
    alive = jobs.coordinator_of(job_id)
    if alive is not None or not attempts.number(history) or attempts.end_of(history) is not None:
        return alive
    endpoint = jobs.engine_of(job_id).revive()
    client, nodes = jobs.client_of(job_id, endpoint), jobs.directory_of(job_id).spec().nodes
    # Nodes that died with the coordinator do not come.
    until(lambda: sum(each.node >= 0 for each in client.status().nodes) >= nodes, _GATHER_S, 0.1)
    return endpoint
