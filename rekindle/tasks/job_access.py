"""The job of a flow run: its name, its directory and the history that its journal tells."""

from __future__ import annotations

from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from rekindle import names
from rekindle.engines.base import Engine
from rekindle.engines.client import JobClient
from rekindle.engines.local import LocalEngine
from rekindle.engines.simulated_hosts import SimulatedHosts
from rekindle.errors import JobError
from rekindle.job.spec import Endpoint, JobDirectory, home, job_directory
from rekindle.recovery.journal.journal import AnyEvent

SUCCEEDED = "succeeded"


def job_id_of(flow_run_id: UUID, name: str) -> str:
    """Return the one job that belongs to a flow run, however often that is run.

    A UUID may begin with the time (version 7), so it is the end that tells two flow runs apart.
    """
    return f"{name}-{flow_run_id.hex[-12:]}"


def lasting_id(flow_run: FlowRun) -> UUID:
    """Return what stays the same however often a flow run is run.

    A subflow is another flow run each time its parent is run; the task run that stands for it in
    the parent is the same.
    """
    return flow_run.parent_task_run_id or flow_run.id


def job_of_this_run(name: str) -> str:
    """Return the job of the flow run that this process is in."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise JobError(f"job {name!r} belongs to a flow run; this is outside of one")
    return job_id_of(lasting_id(context.flow_run), name)


def directory_of(job_id: str) -> JobDirectory:
    """Return the job's directory, whether or not the job exists."""
    return JobDirectory(job_directory(job_id))


def engine_of(job_id: str) -> Engine:
    """Return what places this job's attempts.

    Raises UsageError: there is no such job, or no cluster for it.
    """
    directory = directory_of(job_id)
    if directory.pods.exists():
        from rekindle.engines.kubernetes.engine import engine_for  # the client, where it is used

        return engine_for(directory)
    return LocalEngine(directory, hosts=SimulatedHosts(home()))


def coordinator_of(job_id: str) -> Endpoint | None:
    """Return the job's coordinator if it lives and answers."""
    return engine_of(job_id).alive() if exists(job_id) else None


def client_of(job_id: str, endpoint: Endpoint) -> JobClient:
    """Return what talks to the job's coordinator."""
    return engine_of(job_id).client(endpoint)


def history_of(job_id: str) -> list[AnyEvent]:
    """Read all that happened to the job, through all its attempts; nothing if there is no job."""
    return engine_of(job_id).history() if exists(job_id) else []


def exists(job_id: str) -> bool:
    """Whether a job of this id was described on this machine."""
    return (directory_of(job_id).path / names.SPEC_FILE).exists()
