"""Fixtures of the contract tests: a cluster and a namespace."""

from __future__ import annotations

import pytest
from cluster.client import Cluster
from cluster.fixture import cluster, namespace, shared_cluster
from cluster.spaces import Space

__all__ = ["cluster", "namespace", "shared_cluster"]


@pytest.fixture
def space(shared_cluster: Cluster, namespace: str) -> Space:
    return Space(shared_cluster, namespace)
