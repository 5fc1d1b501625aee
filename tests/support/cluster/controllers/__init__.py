"""What brings about what objects ask for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from cluster.controllers.ascendjobs import AscendJobs
from cluster.controllers.collector import Collector
from cluster.controllers.deployments import Deployments, ReplicaSets
from cluster.controllers.jobs import Jobs
from cluster.controllers.jobsets import JobSets
from cluster.controllers.lifecycle import Lifecycle
from cluster.controllers.loop import Controller, Settings
from cluster.controllers.namespaces import Namespaces
from cluster.controllers.pytorchjobs import PyTorchJobs
from cluster.controllers.quotas import Quotas
from cluster.controllers.scheduler import Scheduler
from cluster.controllers.trainjobs import TrainJobs
from cluster.controllers.volcano import Commands, VolcanoJobs
from cluster.operations import Operations

_ALL: tuple[type[Controller], ...] = (
    Namespaces,
    Scheduler,
    Lifecycle,
    Collector,
    Quotas,
    Jobs,
    Deployments,
    ReplicaSets,
    JobSets,
    AscendJobs,
    TrainJobs,
    PyTorchJobs,
)


@contextlib.asynccontextmanager
async def start_all(operations: Operations, settings: Settings) -> AsyncIterator[None]:
    """Run them all; those of kinds that the server has not have nothing to do."""
    running = [each(operations, settings) for each in _ALL]
    volcano = VolcanoJobs(operations, settings)
    running += [volcano, Commands(operations, settings, volcano)]
    tasks = [asyncio.create_task(each.run()) for each in running]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
