"""Give an account of the cluster the rights that this repository grants to flows."""

from __future__ import annotations

from pathlib import Path

import yaml
from repository import ROOT

from cluster.client import Cluster

_DEPLOY = ROOT / "deploy" / "base"
ACCOUNT = "rekindle-flows"


def flows(cluster: Cluster, path: Path, namespace: str = "default") -> Path:
    """Write a kubeconfig of an account that has the Role of deploy/ and no other rights."""
    place = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    token = cluster.token_for(ACCOUNT, namespace)
    (role,) = yaml.safe_load_all((_DEPLOY / "role.yaml").read_text())
    _, binding = yaml.safe_load_all((_DEPLOY / "service-account.yaml").read_text())
    binding["subjects"][0]["namespace"] = namespace
    cluster.create(f"{place}/roles", role)
    cluster.create(f"{place}/rolebindings", binding)
    return cluster.kubeconfig_for(token, path, namespace)
