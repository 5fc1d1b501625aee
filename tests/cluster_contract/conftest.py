"""The clusters of these tests."""

from __future__ import annotations

from cluster.fixture import cluster, namespace, shared_cluster

__all__ = ["cluster", "namespace", "shared_cluster"]
