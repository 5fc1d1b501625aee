"""The metrics of a job: what a request returns, where, and that the dashboard asks for these."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import aiohttp
import pytest
from jobs.driver import Driver
from jobs.trained import trained
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from repository import ROOT

from rekindle import names
from rekindle.coordinator import metrics as module
from rekindle.coordinator.metrics import JobMetrics, address, metrics_served
from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

RESULTS = ("written", "skipped", "failed")
Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(job: Driver) -> Samples:
    """Return the values of a job's metrics, by name and values of labels."""
    registry = CollectorRegistry()
    registry.register(JobMetrics(job.machine, job.history))
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def recovered() -> Driver:
    """Return a job of which one rank was killed and replaced."""
    job = trained(5, processes=3)
    job.exits(1, signal=9)
    job.spawned()
    job.arrive([0, 2], 5)
    job.arrive([1])
    job.ready(job.ranks)
    job.step(6)
    return job


def test_a_recovery_is_in_the_metrics() -> None:
    job = recovered()
    found = samples(job)
    [incident] = journal.incidents(job.history)
    assert incident.cause.kind is FaultKind.PROCESS
    labels = (FaultKind.PROCESS.value, Strategy.RECOVER_IN_PLACE.value)
    assert found["rekindle_incidents", labels] == 1
    assert found["rekindle_recoveries_total", ()] == 1
    assert found["rekindle_steps_finished", ()] == 6
    assert found["rekindle_ranks_alive", ()] == found["rekindle_ranks", ()] == 3
    assert found["rekindle_restarts_total", ()] == 0
    took = incident.first_step - incident.detected
    assert found["rekindle_recovery_seconds_total", ()] == pytest.approx(took)
    assert 0 <= found["rekindle_goodput_ratio", ()] <= 1


def test_a_killed_rank_is_not_alive() -> None:
    job = trained(5, processes=3)
    job.exits(1, signal=9)
    assert samples(job)["rekindle_ranks_alive", ()] == 2


def test_checkpoints_are_counted_by_their_result(monkeypatch: pytest.MonkeyPatch) -> None:
    job = trained(5)
    assert ("rekindle_checkpoint_age_seconds", ()) not in samples(job)
    job.history += [
        journal.Checkpointed(at=100.0, step=4, path="step-4", bytes=1, seconds=1.0),
        journal.CheckpointLeftOut(at=110.0, step=5, reason="busy"),
    ]
    monkeypatch.setattr(module.time, "time", lambda: 130.0)
    found = samples(job)
    counted = {result: found["rekindle_checkpoints_total", (result,)] for result in RESULTS}
    assert counted == {"written": 1, "skipped": 1, "failed": 0}
    assert found["rekindle_checkpoint_age_seconds", ()] == 30


def test_goodput_is_the_share_of_time_with_new_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job lasts 100 s. Its ranks train for 60 s and do 12 steps. They lose 2 of these."""
    job = Driver()
    fault = recovered().last(journal.FaultSeen).fault
    formed = {"world_size": 2, "sources": {"self": 2}}
    job.history[:] = [
        journal.JobStarted(at=100.0, job_id="j", attempt=0, nodes=1, processes_per_node=2, pid=1),
        journal.Formed(at=119.0, generation=1, step=0, newest=0, **formed),
        journal.FirstStep(at=120.0, generation=1, step=1),
        journal.FaultSeen(at=160.0, incident=1, fault=fault),
        journal.Formed(at=179.0, generation=2, step=6, newest=8, incident=1, **formed),
        journal.FirstStep(at=180.0, generation=2, step=10, incident=1),
        journal.Ended(at=200.0, outcome="stopped", reason="", finished=10),
    ]
    monkeypatch.setattr(module.time, "time", lambda: 200.0)
    found = samples(job)
    assert found["rekindle_steps_lost_total", ()] == 2
    assert found["rekindle_step_seconds", ()] == pytest.approx(5)
    assert found["rekindle_goodput_ratio", ()] == pytest.approx(0.5)


FORMED = {"world_size": 2, "sources": {"self": 2}}
STARTED = {"job_id": "j", "nodes": 1, "processes_per_node": 2, "pid": 1}


def test_the_time_between_attempts_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is off for 10 hours; no coordinator has recorded the end of the first attempt."""
    job = Driver()
    job.history[:] = [
        journal.JobStarted(at=1_000.0, attempt=0, **STARTED),
        journal.Formed(at=1_000.0, generation=1, step=0, newest=0, **FORMED),
        journal.FirstStep(at=1_000.0, generation=1, step=1),
        journal.Checkpointed(at=1_100.0, step=100, path="step-100", bytes=1, seconds=1.0),
        journal.JobStarted(at=37_000.0, attempt=1, **STARTED),
        journal.Formed(at=37_000.0, generation=2, step=100, newest=journal.UNKNOWN, **FORMED),
        journal.Ended(at=37_000.0, outcome="stopped", reason="", finished=100),
    ]
    monkeypatch.setattr(module.time, "time", lambda: 37_000.0)
    found = samples(job)
    assert found["rekindle_step_seconds", ()] == pytest.approx(1)
    assert found["rekindle_goodput_ratio", ()] == pytest.approx(100 / 36_000)


def test_a_new_coordinator_knows_the_steps_of_the_newest_checkpoint() -> None:
    """It knows no step of a rank before the ranks have arrived, so no step has a time."""
    job = Driver()
    job.history[:] = [
        journal.JobStarted(at=1.0, attempt=0, **STARTED),
        journal.Formed(at=2.0, generation=1, step=0, newest=0, **FORMED),
        journal.FirstStep(at=3.0, generation=1, step=1),
        journal.Checkpointed(at=900.0, step=890, path="step-890", bytes=1, seconds=1.0),
    ]
    found = samples(job)
    assert found["rekindle_steps_finished", ()] == 890
    assert ("rekindle_step_seconds", ()) not in found


def test_an_incident_without_an_interruption_is_no_recovery() -> None:
    job = recovered()
    before = samples(job)
    fault = job.last(journal.FaultSeen).fault
    job.history.append(journal.CheckpointFailed(at=job.history[-1].at, incident=99, fault=fault))
    found = samples(job)
    assert found["rekindle_recoveries_total", ()] == before["rekindle_recoveries_total", ()]
    assert sum(v for (name, _), v in found.items() if name == "rekindle_incidents") == 2


@pytest.mark.process
def test_the_listener_is_read_only_and_ends_with_its_block() -> None:
    job = recovered()

    async def run() -> None:
        with socket.create_server((names.LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        url = f"http://{names.LOOPBACK}:{port}/metrics"
        async with aiohttp.ClientSession() as client:
            async with metrics_served(str(port), JobMetrics(job.machine, job.history)):
                async with client.get(url) as answer:
                    found = parsed(await answer.text())
                assert found["rekindle_steps_finished", ()] == 6
                async with client.post(url) as answer:
                    assert answer.status == 405
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get(url)

    asyncio.run(run())


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    ["taken", "nonsense", "127.0.0.1:70000", "127.0.0..1:9464", "1" * 5_000],
    ids=["taken", "nonsense", "port", "host", "digits"],
)
def test_a_bad_address_leaves_the_job_without_metrics(
    text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job = recovered()
    ran: list[bool] = []

    async def run(place: str) -> None:
        async with metrics_served(place, JobMetrics(job.machine, job.history)):
            ran.append(True)

    with socket.create_server((names.LOOPBACK, 0)) as taken:
        asyncio.run(run(str(taken.getsockname()[1]) if text == "taken" else text))
    assert ran == [True]
    assert "the job has no metrics" in capfd.readouterr().err


def test_an_address_is_on_loopback_unless_it_names_a_host() -> None:
    assert address("9464") == (names.LOOPBACK, 9464)
    assert address("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert address("[::1]:9464") == ("::1", 9464)
    with pytest.raises(UsageError, match="give PORT or HOST:PORT"):
        address("localhost")


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    """Each metric is on the dashboard, too."""
    job = recovered()
    job.history.append(journal.Checkpointed(at=1.0, step=4, path="step-4", bytes=1, seconds=1.0))
    board = json.loads((ROOT / "deploy/grafana/rekindle.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"rekindle_\w+", query)}
    offered = {name for name, _ in samples(job)}
    assert asked == offered
