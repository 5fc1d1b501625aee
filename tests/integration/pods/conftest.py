"""The clusters that all tests of a worker share, and a namespace for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.launch import Simulated, start
from cluster.tidy import tidy
from mindcluster import RESOURCE
from training_jobs.baselines import baseline, baseline_of
from training_jobs.pods import new_namespace

from rekindle.engines.kubernetes.client.api import Api, load

__all__ = ["baseline", "baseline_of"]


@pytest.fixture(scope="session")
def worker_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """Start six nodes that run pods as processes of this machine."""
    folder = tmp_path_factory.mktemp("cluster")
    with start(folder, nodes=6, capacity=f"{RESOURCE}=8,example.com/npu=8") as found:
        yield found
        assert not found.complaints()


@pytest.fixture(scope="module")
def cluster(worker_cluster: Simulated) -> Iterator[Simulated]:
    """Return the worker's cluster; restore it after each module."""
    yield worker_cluster
    tidy(worker_cluster)


@pytest.fixture
def api(cluster: Simulated) -> Iterator[Api]:
    """Return a client of the cluster; afterwards clear the injected faults."""
    found = load(str(cluster.kubeconfig), patience_s=20.0)
    yield found
    found.close()
    cluster.clear_faults()


@pytest.fixture
def namespace(cluster: Simulated) -> Iterator[str]:
    """Create a namespace for the test."""
    with new_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="session")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """Start two nodes with four devices each, without JobSets."""
    folder = tmp_path_factory.mktemp("lean")
    with start(folder, nodes=2, without="jobsets", capacity="example.com/npu=4") as found:
        yield found


@pytest.fixture
def space(lean: Simulated) -> Iterator[str]:
    """Create a namespace for the test in the lean cluster."""
    with new_namespace(lean) as name:
        yield name
