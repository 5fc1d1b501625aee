"""Last step of the train flow: remove what the job has left where it ran."""

from __future__ import annotations

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from rekindle.errors import JobError, UsageError
from rekindle.tasks import job_access as jobs


@task(name="release", cache_policy=NO_CACHE)
def release(job_id: str) -> bool:
    """Remove what is left of an ended job; say whether all is gone.

    What stays is no reason for the flow run to fail: the next one of this job removes it.
    """
    try:
        jobs.engine_of(job_id).release()
    except (JobError, UsageError) as error:
        get_run_logger().warning("Something of job %s is left in the cluster: %s", job_id, error)
        return False
    return True
