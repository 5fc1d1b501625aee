"""What MindCluster knows of a host becomes an incident of the job whose pod is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cluster.launch import Simulated
from mindcluster import RESOURCE, card, device_info, rank, reset_config
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.job import pause_all
from training_jobs.pods import NAMESPACE, PodJob
from training_jobs.record import Record

from rekindle.engines.kubernetes.ascend import Ascend
from rekindle.engines.kubernetes.pods import Kind, Recovery
from rekindle.recovery import journal
from rekindle.recovery.classification import Source
from rekindle.recovery.fault import Kind as FaultKind

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

PAUSE_ALL = pause_all(12)
RESET = "80C78008"  # RestartNPU


@pytest.mark.parametrize("cluster", [{"capacity": f"{RESOURCE}=8"}], indirect=True)
def test_a_chip_that_has_to_be_reset(
    job: Callable[..., PodJob], cluster: Simulated, baseline: Record
) -> None:
    """The incident names code and device; other pods' chips and other hosts are passed over."""
    run = job(*PAUSE_ALL, pods={"device": RESOURCE})
    run.wait_pause(12)
    pods = {node: run.pod_of(node) for node in (0, 1)}
    hosts = {node: pod["spec"]["nodeName"] for node, pod in pods.items()}
    for pod in pods.values():
        chips: dict[str, Any] = {"huawei.com/AscendReal": "Ascend910-6,Ascend910-7"}
        name = pod["metadata"]["name"]
        cluster.patch(f"{NAMESPACE}/pods/{name}", {"metadata": {"annotations": chips}})
    (elsewhere,) = {"node-0", "node-1", "node-2"} - set(hosts.values())
    things = [
        device_info(elsewhere, card(7, RESET, "RestartNPU")),
        device_info(hosts[0], card(5, RESET, "RestartNPU")),
        device_info(hosts[1], card(7, RESET, "RestartNPU")),
    ]
    for thing in things:
        cluster.create("/api/v1/namespaces/kube-system/configmaps", thing)
    run.wait(lambda: run.events_of(journal.FaultSeen), "the fault in the journal")
    run.release_all()
    assert run.end().outcome == "succeeded", run.story()
    signs = [event.sign for event in run.events_of(journal.SignSeen)]
    assert {(sign.what, sign.node, sign.device) for sign in signs} == {(RESET, 1, 1)}
    assert [(sign.gone, sign.by) for sign in signs] == [
        *((False, "mindcluster"), (True, "its healing"))
    ]
    (incident,) = run.incidents()
    assert (incident.cause.kind, incident.cause.code) == (FaultKind.DEVICE, RESET)
    assert (incident.cause.node, incident.cause.device) == (1, 1)
    assert incident.cause.host == hosts[1]
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)
    run.remove()


@pytest.mark.parametrize("cluster", [{"capacity": f"{RESOURCE}=8"}], indirect=True)
def test_mindclusters_own_recovery(
    job: Callable[..., PodJob], cluster: Simulated, baseline: Record
) -> None:
    """Which rank it lists is in the journal, what comes of it is told; nobody else acts."""
    folders = dict.fromkeys(("reset_config", "data_trace", "driver"), False)
    settings = {"kind": Kind.ASCENDJOB, "device": RESOURCE, "ascend": Ascend(**folders)}
    run = job(*PAUSE_ALL, pods=settings | {"recovery": Recovery.MINDCLUSTER})
    run.wait_pause(12)
    index = {n: run.pod_of(n)["metadata"]["annotations"]["hccl/rankIndex"] for n in (0, 1)}
    listed = 2 * int(index[1]) + 1  # MindCluster counts ranks by its own index of pods
    path = f"{NAMESPACE}/configmaps"
    cluster.create(path, reset_config("job", RankList=[rank(listed)], RestartFaultProcess=True))
    run.wait(lambda: run.events_of(journal.SignSeen), "the rank in the journal")
    (seen,) = run.events_of(journal.SignSeen)
    assert (seen.sign.source, seen.sign.what) == (Source.MINDCLUSTER, "fault")
    assert (seen.sign.node, seen.sign.device) == (1, 1)
    groups = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"
    (group,) = cluster.get(groups)["items"]
    noted = {"metadata": {"annotations": {"ProcessRecoverStatus": "retry-success"}}}
    cluster.patch(f"{groups}/{group['metadata']['name']}", noted)
    cluster.patch(f"{path}/reset-config-job", {"data": reset_config("job")["data"]})
    run.wait(lambda: len(run.events_of(journal.SignSeen)) == 2, "the end of the recovery")
    assert run.events_of(journal.SignSeen)[1].sign.gone
    run.wait(lambda: "which has helped" in "".join(run.told), "the result")
    run.release_all()
    assert run.end().outcome == "succeeded", run.story()
    assert run.incidents() == []
    assert_same_training(run.record, baseline)
    cluster.delete(f"{path}/reset-config-job")
    run.remove()
