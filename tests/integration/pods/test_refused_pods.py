"""Pods that a quota refuses during a run: the log has the API server's own message."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import role
from cluster.launch import Simulated
from training_jobs.pods import PodJob
from waiting import wait_until

from rekindle import names
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind
from rekindle.engines.kubernetes.placement.placement import Placement
from rekindle.engines.kubernetes.placement.quarantine import Hosts
from rekindle.job.spec import home

pytestmark = pytest.mark.timeout(300)  # a cluster

REFUSED = "forbidden: exceeded quota: few, requested: pods=1, used: pods=0, limited: pods=0"


@pytest.mark.parametrize("kind", list(WorkloadKind))
def test_the_message_is_shown(
    kind: WorkloadKind,
    cluster: Simulated,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log has the message once for the workload's pods.

    A launch has it for the coordinator's pod. The rights of the Role of deploy/ suffice.
    """
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path / "home"))
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    cluster.create(f"/api/v1/namespaces/{namespace}/resourcequotas", quota)
    kubeconfig = role.flows(cluster, tmp_path / "flows", namespace)
    pods = {"kind": kind, "device": "example.com/npu"}
    job = PodJob(tmp_path, cluster, namespace=namespace, pods=pods, kubeconfig=kubeconfig)
    job.steer()
    place = Placement(job.directory, job.pods, job.api, Hosts(job.api, job.pods, home()))

    def refused() -> list[str]:
        return [each for each in job.messages if REFUSED in each]

    try:
        place.place(place.around(0))
        wait_until(refused, "the message about the workload's pods", 30)
        wait_until(place.coordinator_words, "the message about the coordinator's pod", 30)
        (words,) = place.coordinator_words()
        place.remove()
    finally:
        job.close()
    assert REFUSED in words
    (shown,) = refused()
    assert "FailedCreate at 2" in shown
