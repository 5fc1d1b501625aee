"""What brings about what objects ask for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from cluster.controllers.collector import Collector
from cluster.controllers.deployments import Deployments, ReplicaSets
from cluster.controllers.jobs import Jobs
from cluster.controllers.lifecycle import Lifecycle
from cluster.controllers.loop import Settings
from cluster.controllers.namespaces import Namespaces
from cluster.controllers.quotas import Quotas
from cluster.controllers.scheduler import Scheduler
from cluster.operations import Operations

ALL = (
    Namespaces,
    Scheduler,
    Lifecycle,
    Collector,
    Quotas,
    Jobs,
    Deployments,
    ReplicaSets,
)


@contextlib.asynccontextmanager
async def start_all(operations: Operations, settings: Settings) -> AsyncIterator[None]:
    """Run them all; those of kinds that the server has not have nothing to do."""
    tasks = [asyncio.create_task(each(operations, settings).run()) for each in ALL]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
