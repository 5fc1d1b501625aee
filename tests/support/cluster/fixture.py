"""Fixtures: a cluster, and a namespace in one.

`from cluster.fixture import cluster, namespace` in a conftest.py makes them available. If
REKINDLE_TEST_KUBECONFIG names a cluster, the fixtures use that cluster, and tests marked
`simulated` are skipped.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.client import Cluster
from cluster.launch import Simulated, start

__all__ = ["Cluster", "Simulated", "cluster", "namespace", "shared_cluster"]


def _is_simulated_only(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("simulated") is not None


def _real() -> str:
    return os.environ.get("REKINDLE_TEST_KUBECONFIG", "")


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Yield a cluster for one test, which can break it.

    Indirect parameters are options of `start`.
    """
    if _real():
        if _is_simulated_only(request):
            pytest.skip("only the simulated cluster can do that")
        yield from _named()
        return
    options: dict[str, Any] = getattr(request, "param", {})
    with start(tmp_path / "cluster", **options) as found:
        yield found
        assert not found.complaints()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster for all tests that leave it intact, each in its own namespace."""
    if _real():
        yield from _named()
        return
    folder = tmp_path_factory.mktemp("cluster")
    with start(folder, capacity="example.com/npu=8") as found:
        yield found
        assert not found.complaints()


@pytest.fixture
def namespace(request: pytest.FixtureRequest, shared_cluster: Cluster) -> Iterator[str]:
    """Yield the name of a new namespace in the shared cluster."""
    if _is_simulated_only(request) and not shared_cluster.simulated:
        pytest.skip("only the simulated cluster can do that")
    name = f"test-{secrets.token_hex(4)}"
    shared_cluster.create("/api/v1/namespaces", {"metadata": {"name": name}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts"
    shared_cluster.until(account, lambda found: "default" in found)
    yield name
    if isinstance(shared_cluster, Simulated):
        shared_cluster.clear_faults()
    shared_cluster.delete(f"/api/v1/namespaces/{name}")


def _named() -> Iterator[Cluster]:
    found = Cluster(Path(_real()))
    try:
        yield found
    finally:
        found.close()
