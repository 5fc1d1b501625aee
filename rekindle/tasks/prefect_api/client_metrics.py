"""Show the jobs that this process steers in the registry of Prefect's client metrics.

Prefect serves that registry in each flow's process that has PREFECT_CLIENT_METRICS_ENABLED, with
the metrics of its own clients. A request reads what the process knows; no job does work for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator

from prefect.settings import get_current_settings
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.recovery.journal.journal import (
    AnyEvent,
    Checkpointed,
    CheckpointFailed,
    CheckpointLeftOut,
    FirstStep,
    Formed,
    Incident,
    IncidentFold,
    Progress,
)

_RESULTS = {Checkpointed: "written", CheckpointLeftOut: "skipped", CheckpointFailed: "failed"}
_JOB = ["job"]


class JobNumbers:
    """The numbers of one job, from its events. incidents: the fold that the owner feeds."""

    def __init__(self, incidents: IncidentFold) -> None:
        self.finished, self.planned = 0, 0
        self.checkpoints: Counter[str] = Counter()
        self._incidents = incidents

    def add(self, event: AnyEvent) -> None:
        """Count the next event."""
        match event:
            case Progress():
                self.finished, self.planned = event.finished, event.total
            case Formed() | FirstStep():
                self.finished = event.step
        if result := _RESULTS.get(type(event)):
            self.checkpoints[result] += 1

    def incidents(self) -> Counter[tuple[str, str]]:
        """Return the number of incidents by kind and last strategy."""
        found = [each for each in [*self._incidents.by_number.values()] if each.faults]
        return Counter((each.cause.kind.value, _strategy(each)) for each in found)


class FlowMetrics(Collector):
    """Collect the numbers of all jobs that this process steers now."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobNumbers] = {}

    @contextlib.contextmanager
    def shows(self, job_id: str, numbers: JobNumbers) -> Iterator[None]:
        """Show a job while the block runs, if this process has client metrics."""
        if get_current_settings().client.metrics.enabled:
            _join_registry(self)
        self._jobs[job_id] = numbers
        try:
            yield
        finally:
            del self._jobs[job_id]

    def describe(self) -> list[Metric]:
        """Return nothing: the registry then does not collect when this object joins it."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers of all jobs."""
        finished = GaugeMetricFamily(
            "rekindle_flow_steps_finished", "Steps that the flow has seen finished.", labels=_JOB
        )
        planned = GaugeMetricFamily(
            "rekindle_flow_steps_planned", "Steps of the whole job; 0: unknown.", labels=_JOB
        )
        incidents = GaugeMetricFamily(
            "rekindle_flow_incidents",
            "Incidents of the job.",
            labels=[*_JOB, "kind", "strategy"],
        )
        checkpoints = CounterMetricFamily(
            "rekindle_flow_checkpoints", "Checkpoints that were due.", labels=[*_JOB, "result"]
        )
        for job_id, numbers in [*self._jobs.items()]:
            finished.add_metric([job_id], numbers.finished)
            planned.add_metric([job_id], numbers.planned)
            for labels, count in numbers.incidents().items():
                incidents.add_metric([job_id, *labels], count)
            for result in _RESULTS.values():
                checkpoints.add_metric([job_id, result], numbers.checkpoints[result])
        yield from (finished, planned, incidents, checkpoints)


@functools.cache
def _join_registry(metrics: FlowMetrics) -> None:
    REGISTRY.register(metrics)


def _strategy(incident: Incident) -> str:
    return incident.strategy.value if incident.strategy else "none"


METRICS = FlowMetrics()  # of this process
