"""The numbers of a flow's jobs in the registry of Prefect's client metrics."""

from __future__ import annotations

from prefect.settings import PREFECT_CLIENT_METRICS_ENABLED, temporary_settings
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal.journal import (
    Checkpointed,
    CheckpointFailed,
    Decided,
    FaultSeen,
    IncidentFold,
    Progress,
)
from rekindle.recovery.policy.policy import Strategy
from rekindle.tasks.prefect_api import client_metrics
from rekindle.tasks.prefect_api.client_metrics import FlowMetrics, JobNumbers


def numbers() -> JobNumbers:
    """Return the numbers of a job with an incident, a checkpoint, and one that failed."""
    fold = IncidentFold()
    found = JobNumbers(fold)
    killed = Fault(kind=FaultKind.PROCESS, message="killed")
    full = Fault(kind=FaultKind.STORAGE, message="the disk is full")
    for event in (
        Checkpointed(step=5, path="/c", bytes=1, seconds=0.1),
        CheckpointFailed(incident=1, fault=full),
        FaultSeen(incident=2, fault=killed),
        Decided(incident=2, strategy=Strategy.RESTART, reason="r", fault=killed),
        Progress(finished=9, newest=9, total=20, metrics={}),
    ):
        fold.add(event)
        found.add(event)
    return found


def test_a_scrape_shows_the_jobs_that_the_process_steers() -> None:
    """Each value has the job's id; a job that has ended is not there."""
    metrics, registry = FlowMetrics(), CollectorRegistry()
    registry.register(metrics)
    with metrics.shows("a-job", numbers()):
        text = generate_latest(registry).decode()
    for line in (
        'rekindle_flow_steps_finished{job="a-job"} 9.0',
        'rekindle_flow_steps_planned{job="a-job"} 20.0',
        'rekindle_flow_incidents{job="a-job",kind="process",strategy="restart"} 1.0',
        'rekindle_flow_incidents{job="a-job",kind="storage",strategy="none"} 1.0',
        'rekindle_flow_checkpoints_total{job="a-job",result="written"} 1.0',
        'rekindle_flow_checkpoints_total{job="a-job",result="failed"} 1.0',
    ):
        assert line in text.splitlines()
    assert "a-job" not in generate_latest(registry).decode()


def test_the_registry_of_prefect_is_joined_once() -> None:
    """Only a process with client metrics joins, and a second job does not join again."""
    metrics = FlowMetrics()
    try:
        with metrics.shows("a-job", numbers()):
            assert "a-job" not in generate_latest(REGISTRY).decode()
        with temporary_settings({PREFECT_CLIENT_METRICS_ENABLED: True}):
            for name in ("b-job", "c-job"):
                with metrics.shows(name, numbers()):
                    assert name in generate_latest(REGISTRY).decode()
    finally:
        REGISTRY.unregister(metrics)
        client_metrics._join_registry.cache_clear()
