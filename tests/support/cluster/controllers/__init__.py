"""The controllers of the simulated cluster."""

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
from cluster.controllers.scheduler import Scheduler
from cluster.controllers.trainjobs import TrainJobs
from cluster.controllers.volcano import VolcanoJobs
from cluster.operations import Operations

_ALL: tuple[type[Controller], ...] = (
    Namespaces,
    Scheduler,
    Lifecycle,
    Collector,
    Jobs,
    Deployments,
    ReplicaSets,
    JobSets,
    AscendJobs,
    TrainJobs,
    PyTorchJobs,
    VolcanoJobs,
)


@contextlib.asynccontextmanager
async def start_all(operations: Operations, settings: Settings) -> AsyncIterator[None]:
    """Run all controllers. A controller whose kind is not installed gets no events."""
    tasks = [asyncio.create_task(each(operations, settings).run()) for each in _ALL]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
