"""A cluster of its own for each test, and jobs in its pods."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.launch import Simulated, start
from training_jobs.baselines import baseline, baseline_of
from training_jobs.injection import Fault
from training_jobs.pods import PodJob
from training_jobs.record import Record

from rekindle import names
from rekindle.engines.kubernetes.api import Api, load

__all__ = ["baseline", "baseline_of"]


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Simulated]:
    """Three nodes that run pods as processes of this machine; options by indirect parameters."""
    with start(tmp_path / "cluster", **getattr(request, "param", {})) as found:
        yield found


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Simulated]:
    """A cluster for all tests of a module, with as many nodes as its NODE_COUNT says."""
    nodes: int = request.module.NODE_COUNT
    with start(tmp_path_factory.mktemp("cluster"), nodes=nodes) as found:
        yield found


@pytest.fixture
def api(server: Simulated) -> Iterator[Api]:
    """A client of that; what the server was told to get wrong ends with it."""
    found = load(str(server.kubeconfig), patience_s=20.0)
    yield found
    found.close()
    server.clear_faults()


@pytest.fixture(scope="session")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """Two nodes with four devices each, and no JobSets; for tests that leave nothing behind."""
    folder = tmp_path_factory.mktemp("cluster")
    with start(folder, nodes=2, without="jobsets", capacity="example.com/npu=4") as found:
        yield found


@pytest.fixture
def space(lean: Simulated) -> Iterator[str]:
    """A namespace of the test's own there."""
    name = f"test-{secrets.token_hex(4)}"
    lean.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    lean.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def job(
    tmp_path: Path, cluster: Simulated, baseline: Record, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., PodJob]]:
    """Start a job with faults; its objects go with the test."""
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path / "home"))
    jobs: list[PodJob] = []

    def begin(*faults: Fault, **settings: Any) -> PodJob:
        folder = tmp_path / f"run{len(jobs)}"
        folder.mkdir()
        jobs.append(PodJob(folder, cluster, *faults, **settings))
        return jobs[-1].start()

    yield begin
    for each in jobs:
        each.close()
