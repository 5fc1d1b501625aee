"""Stop the job of a flow run that has ended. Hooks run in the flow's process or its runner's.

| the flow run | the job | the flow run then |
|---|---|---|
| fails, because its job has ended | has ended | stays failed |
| fails, because the job cannot start or be steered | is unchanged | is run again, once |
| fails for another reason | continues | is run again, and adopts it |
| crashes: its process exited or was killed | continues | is run again, and adopts it |
| is cancelled by a person | is stopped, with a final checkpoint | stays cancelled |
| is cancelled, and another flow run steers the job | continues | stays cancelled |
| is cancelled, because its runner shuts down | continues | waits for a person's retry |
| crashes with its runner, or only for the server | continues | waits for a retry or an automation |
"""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger

from rekindle.errors import RekindleError
from rekindle.job.spec import Endpoint
from rekindle.recovery.journal import attempts
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.tasks import job_access as jobs
from rekindle.tasks.identity import recorded_job
from rekindle.tasks.launch import describe_elsewhere
from rekindle.tasks.prefect_api import Log
from rekindle.tasks.prefect_api.run_states import demand, is_refused
from rekindle.tasks.report import report_later
from rekindle.waiting import until

_GATHER_S = 10.0  # time for agents to connect to another coordinator

# The train flow's own process may fail this many times before a person must act. The job does not
# stop for that. Evictions do not count, as in other policies.
OF_FLOW_PROCESS = Policy(
    strategies=(Strategy.RESCHEDULE_JOB_ISOLATED, Strategy.RESCHEDULE_JOB),
    max_reschedules=30,
    max_reschedules_in_row=30,
)


def stop_job(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Stop the job of a flow run that was cancelled."""
    log = flow_run_logger(flow_run, flow)
    why = demand(state)
    if not why:
        job_id = recorded_job(flow_run)
        log.info("The runner shuts down; job %s continues. Retry this flow run to adopt it", job_id)
        return
    job_id = stop_for(flow_run, _by(why, flow_run), log)
    if job_id and jobs.directory_of(job_id).pods.exists():
        _remove_from_cluster(job_id, log)


def stop_abandoned(flow_run: FlowRun, state: State[Any], log: Log) -> bool:
    """Stop the job of a flow run that has ended for good, or is suspended, without its process.

    Return whether it did. Prefect runs no hook if a person ends a run that has no process, and
    the hook of another one may have been killed.
    """
    why = demand(state)
    if not why or is_refused(state):
        return False
    job_id = recorded_job(flow_run)
    describe_elsewhere(flow_run, job_id)
    endpoint = jobs.coordinator_of(job_id)
    client = jobs.client_of(job_id, endpoint) if endpoint else None
    if client is not None and (holder := client.status().holder):
        does = "which continues" if _is_another_run(holder, flow_run) else "and stops it"
        log.info("%s controls job %s, %s", holder, job_id, does)
        return False
    if stop_for(flow_run, _by(why, flow_run), log) and jobs.directory_of(job_id).pods.exists():
        _remove_from_cluster(job_id, log)
    return True


def stop_for(flow_run: FlowRun, by: str, log: Log) -> str:
    """Stop a flow run's job, with a final checkpoint. Return the job's id if it was stopped, or "".

    by: what of which flow run demands it. Another coordinator replaces a failed one first. The job
    continues if another flow run steers it. Raises RekindleError, ValueError: that is not possible.
    """
    job_id = recorded_job(flow_run)
    try:
        describe_elsewhere(flow_run, job_id)
        endpoint = _coordinator(job_id)
        if endpoint is None:
            log.info("Job %s does not run; there is nothing to stop", job_id)
            if jobs.directory_of(job_id).pods.exists():  # a launch or a release was interrupted
                _release(job_id, log)
            return ""
        if not order_stop(job_id, flow_run, endpoint, by=by, log=log):
            return ""
    except (RekindleError, ValueError):
        log.exception("Rekindle could not stop job %s", job_id)
        raise
    report_later(job_id, flow_run.id)
    return job_id


def order_stop(job_id: str, flow_run: FlowRun, endpoint: Endpoint, *, by: str, log: Log) -> bool:
    """Order the end of a job from its coordinator; return whether the order was given.

    The job continues if another flow run steers it. Raises JobError: the coordinator does not
    answer.
    """
    client = jobs.client_of(job_id, endpoint)
    if _is_another_run(holder := client.status().holder, flow_run):
        log.info("%s controls job %s, which continues", holder, job_id)
        return False
    # Without the lease: a process that is about to end may still have it. A person who ends the run
    # does not care which process of the run steers.
    client.stop(by=by)
    log.info("Rekindle stops job %s; retry this flow run to resume it", job_id)
    return True


def _by(why: str, flow_run: FlowRun) -> str:
    return f"{why} of flow run {flow_run.name} ({flow_run.id})"


def _is_another_run(holder: str, flow_run: FlowRun) -> bool:
    """Return whether the process that steers the job belongs to another flow run with this job."""
    return holder.startswith("flow run ") and f"({flow_run.id})" not in holder


def _remove_from_cluster(job_id: str, log: Log) -> None:
    """Remove the remains of a stopped job from the cluster, because no flow process does it."""
    limit_s = _GATHER_S + jobs.directory_of(job_id).spec().policy.dump_timeout_s
    if until(lambda: attempts.end_of(jobs.history_of(job_id)) is not None, limit_s, 0.5):
        _release(job_id, log)
    else:
        log.warning(
            "Job %s did not end within %g s; its pods remain in the cluster", job_id, limit_s
        )


def _release(job_id: str, log: Log) -> None:
    if jobs.release(job_id, log):
        log.info("Rekindle removed all objects of job %s from the cluster", job_id)


def _coordinator(job_id: str) -> Endpoint | None:
    """Return the coordinator that can stop the job; start one if ranks train without any."""
    history = jobs.history_of(job_id)
    alive = jobs.coordinator_of(job_id)
    if alive is not None or not attempts.number(history) or attempts.end_of(history) is not None:
        return alive
    endpoint = jobs.engine_of(job_id).revive()
    client, nodes = jobs.client_of(job_id, endpoint), jobs.directory_of(job_id).spec().nodes
    # Nodes that failed together with the coordinator do not join.
    until(lambda: sum(each.node >= 0 for each in client.status().nodes) >= nodes, _GATHER_S, 0.1)
    return endpoint
