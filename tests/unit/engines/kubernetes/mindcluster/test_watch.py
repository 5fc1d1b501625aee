"""The watch of MindCluster's ConfigMaps, against an API server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster.launch import Simulated, start
from mindcluster import (
    RESOURCE,
    card,
    cluster_info,
    device_info,
    device_list,
    node_info,
    rank,
    reset_config,
)
from rendered import spec
from waiting import wait_until

pytest.importorskip("kubernetes.client")
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings, Recovery
from rekindle.engines.kubernetes.mindcluster.watch import ReportHandlers, watch_hosts
from rekindle.errors import JobError
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Urgency
from rekindle.recovery.journal.journal import AnyEvent, HealthEventSeen

Object = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with start(tmp_path_factory.mktemp("cluster"), nodes=1) as found:
        thing = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "mindx-dl"}}
        found.create("/api/v1/namespaces", thing)
        yield found


def path_of(thing: Object) -> str:
    return f"/api/v1/namespaces/{thing['metadata']['namespace']}/configmaps"


class Job:
    """The pods of a job, one on each host, and all received reports."""

    def __init__(self, cluster: Simulated, kubeconfig: Path | None = None) -> None:
        self.api = load(str(kubeconfig or cluster.kubeconfig), patience_s=1.0)
        self.cluster = cluster
        self.nodes: dict[str, int] = {}
        self.pods: list[Object] = []
        self.events: list[HealthEvent] = []
        self.texts: list[str] = []
        self.away = False
        self.journal: list[AnyEvent] = []

    def place(self, host: str, node: int, chips: str = "Ascend910-0,Ascend910-1") -> None:
        ip = f"10.0.0.{node + 1}"
        metadata = {
            "name": f"pod-{node}",
            "uid": f"uid-{host}-{node}",
            "labels": {"rekindle.dev/role": "worker"},
            "annotations": {"huawei.com/AscendReal": chips},
        }
        status = {"phase": "Running", "podIP": ip}
        self.pods.append({"metadata": metadata, "spec": {"nodeName": host}, "status": status})
        self.nodes[ip] = node

    def report(self, event: HealthEvent) -> None:
        if self.away:
            raise JobError("no coordinator")
        self.events.append(event)

    @contextlib.contextmanager
    def watched(self, recovery: Recovery = Recovery.REKINDLE) -> Iterator[None]:
        handlers = ReportHandlers(
            self.report, self.texts.append, lambda: self.pods, self.nodes.get, self.journal
        )
        pods = KubernetesSettings(image="i", device=RESOURCE, recovery=recovery)
        with watch_hosts(self.api, pods, spec(processes_per_node=2), handlers):
            yield

    def wait_for(self, *expected: tuple[str, int, int, bool]) -> None:
        """Wait for exactly these events (code, node, device, gone)."""

        def all_of_them() -> bool:
            return len(self.events) >= len(expected)

        wait_until(all_of_them, f"events: {self.events}, texts: {self.texts}")
        assert sorted((s.what, s.node, s.device, s.gone) for s in self.events) == sorted(expected)

    def write(self, thing: Object) -> None:
        """Create or change a ConfigMap, as MindCluster does."""
        path, name = path_of(thing), thing["metadata"]["name"]
        code, _ = self.cluster.call("POST", path, thing)
        if code == 409:
            self.cluster.patch(f"{path}/{name}", {"data": thing["data"]})

    def remove(self, thing: Object) -> None:
        self.cluster.delete(f"{path_of(thing)}/{thing['metadata']['name']}")


@pytest.fixture
def job(cluster: Simulated) -> Iterator[Callable[..., Job]]:
    """Return a function that creates jobs; the fixture removes their ConfigMaps."""
    made: list[Job] = []

    def make(**more: Any) -> Job:
        made.append(Job(cluster, **more))
        return made[-1]

    yield make
    for one in made:
        one.api.close()
    for namespace in ("kube-system", "mindx-dl"):
        for thing in cluster.get(f"/api/v1/namespaces/{namespace}/configmaps")["items"]:
            if thing["metadata"].get("labels"):
                cluster.delete(f"{path_of(thing)}/{thing['metadata']['name']}")


@pytest.mark.process
def test_faults_come_and_go(job: Callable[..., Job]) -> None:
    """The watch reports each fault once, for any number of writes, and its end once."""
    run = job()
    run.place("a", 0)
    run.write(device_info("a", card(0, "80C98006", "NotHandleFault")))
    with run.watched():
        run.wait_for(("80C98006", 0, 0, False))
        for updated in (1, 2, 3):
            run.write(device_info("a", card(0, "80C98006"), card(1, "80E01801"), updated=updated))
        run.write(node_info("a", "2C000031"))
        expected = [
            ("80C98006", 0, 0, False),
            ("80E01801", 0, 1, False),
            ("2C000031", 0, -1, False),
        ]
        run.wait_for(*expected)
        run.write(device_info("a", card(1, "80E01801"), updated=4))
        run.remove(node_info("a"))
        run.wait_for(*expected, ("80C98006", 0, 0, True), ("2C000031", 0, -1, True))
    assert run.texts == []


def test_two_jobs_and_other_hosts(job: Callable[..., Job]) -> None:
    """Each job gets reports only about its own chips, on hosts with its pods."""
    first, second = job(), job()
    first.place("a", 0)
    first.place("b", 1)
    second.place("a", 0, chips="Ascend910-2,Ascend910-3")
    with first.watched(), second.watched():
        first.write(device_info("elsewhere", card(0, "80E01801")))
        first.write(device_info("a", card(1, "80E01801"), card(2, "80E18402")))
        first.write(device_info("b", card(0, "80C98006")))
        first.wait_for(("80E01801", 0, 1, False), ("80C98006", 1, 0, False))
        second.wait_for(("80E18402", 0, 0, False))


def test_a_host_that_is_taken_later(job: Callable[..., Job]) -> None:
    """When a node starts on a host, the watch reports the host's earlier faults."""
    run = job()
    with run.watched():
        run.write(device_info("a", card(0, "80E01801")))
        run.write(device_info("b"))
        run.place("b", 1)
        run.place("a", 0)
        run.wait_for(("80E01801", 0, 0, False))


def test_a_coordinator_that_is_away(job: Callable[..., Job]) -> None:
    """If the coordinator is absent, the watch reports the fault after its return."""
    run = job()
    run.place("a", 0)
    run.away = True
    with run.watched():
        run.write(device_info("a", card(0, "80E01801")))
        run.write(device_info("a", card(0, "80E01801"), updated=2))
        run.away = False
        run.wait_for(("80E01801", 0, 0, False))


def recorded(host: str, what: str, **more: Any) -> HealthEventSeen:
    event = HealthEvent(source=EventSource.ASCEND, what=what, node=7, device=0, by="mindcluster")
    event = msgspec.structs.replace(event, **more)
    return HealthEventSeen(health_event=event, host=host, urgency=Urgency.NONE, explanation="")


def test_what_is_over_since_somebody_else_steered(job: Callable[..., Job]) -> None:
    """After an adoption, the watch reports the end of faults that are over.

    It does not end a fault that a person reported.
    """
    run = job()
    run.place("a", 0)
    run.write(device_info("a", card(0, "80E01801")))
    run.journal = [
        recorded("a", "80E01801"),
        recorded("a", "80C98006"),
        recorded("a", "80C98006", device=-1, origin=FaultOrigin.NODE),
        recorded("a", "80CB8006", by="somebody"),
        recorded("a", "80CD8003"),
        recorded("a", "80CD8003", gone=True, by="its reset"),
        recorded("b", "80E01801"),
    ]
    with run.watched():
        run.wait_for(("80C98006", 0, 0, True), ("80C98006", 0, -1, True))
        run.write(device_info("a"))
        run.wait_for(*(("80C98006", 0, d, True) for d in (0, -1)), ("80E01801", 0, 0, True))


def test_damage_is_said_once(job: Callable[..., Job]) -> None:
    """A damaged ConfigMap has one report, and does not end the watch.

    The watch ignores damage of a host without a pod.
    """
    run = job()
    run.place("a", 0)
    thing = device_info("a", card(0, "80E01801"))
    with run.watched():
        for text in ("{", "{"):
            run.write(thing | {"data": {"DeviceInfoCfg": text}})
            run.write(device_info("b") | {"data": {"DeviceInfoCfg": text}})
        wait_until(lambda: run.texts, "word of the damage")
        run.write(thing)
        run.wait_for(("80E01801", 0, 0, False))
        run.write(device_info("a", card(0, "80E01801"), card(1, "", "ManuallySeparateNPU")))
        wait_until(lambda: len(run.texts) > 1, "word of the chip that is out of use")
    assert "mindx-dl-deviceinfo-a" in run.texts[0]
    assert "host a, chip 1: is excluded" in run.texts[1]
    assert len(run.texts) == 2


def others() -> list[threading.Thread]:
    """Return the threads that watch ConfigMaps."""
    return [one for one in threading.enumerate() if one.name == "rekindle-npu"]


def allowed(cluster: Simulated, namespaces: tuple[str, ...], folder: Path) -> Path:
    """Return a kubeconfig of an account that may read ConfigMaps only in these namespaces."""
    account = f"reader-{len(namespaces)}"
    token = cluster.token_for(account)
    rbac = "rbac.authorization.k8s.io"
    for namespace in namespaces:
        path = f"/apis/{rbac}/v1/namespaces/{namespace}"
        rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch"]}
        meta = {"name": account, "namespace": namespace}
        cluster.create(f"{path}/roles", {"metadata": meta, "rules": [rule]})
        role = {"apiGroup": rbac, "kind": "Role", "name": account}
        who = {"kind": "ServiceAccount", "name": account, "namespace": "default"}
        binding = {"metadata": meta, "roleRef": role, "subjects": [who]}
        cluster.create(f"{path}/rolebindings", binding)
    return cluster.kubeconfig_for(token, folder / "kubeconfig")


def test_no_rights_at_all(cluster: Simulated, job: Callable[..., Job], tmp_path: Path) -> None:
    """Without rights, the watch reports this once with the remedy, and sends no event."""
    run = job(kubeconfig=allowed(cluster, (), tmp_path))
    run.place("a", 0)
    run.journal = [recorded("a", "80E01801")]  # the fault may still exist
    with run.watched():
        wait_until(lambda: not others(), "the end of those that may not read")
        wait_until(lambda: run.texts, "word of the refusal")
    assert (len(run.texts), run.events) == (1, [])
    assert "deploy/mindcluster" in run.texts[0]
    assert "forbidden" in run.texts[0]


def test_clusterds_word_where_that_of_hosts_may_not_be_read(
    cluster: Simulated, job: Callable[..., Job], tmp_path: Path
) -> None:
    """Without rights in kube-system, the watch uses ClusterD's summary of all hosts."""
    run = job(kubeconfig=allowed(cluster, ("mindx-dl",), tmp_path))
    run.place("a", 0)
    with run.watched():
        hosts = {"mindx-dl-deviceinfo-a": device_list(card(1, "80E01801"))}
        run.write(cluster_info("cluster-info-device-0", hosts))
        run.wait_for(("80E01801", 0, 1, False))
    assert run.texts == []


def noted(cluster: Simulated, workload: str, key: str, value: str) -> None:
    """Write an annotation to the PodGroup of a job, as ClusterD does."""
    path = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"
    maps = "/api/v1/namespaces/default/configmaps"
    uid = cluster.create(maps, {"metadata": {"name": workload}})["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": workload, "uid": uid}
    metadata = {"name": f"{workload}-group", "ownerReferences": [owner]}
    cluster.create(path, {"metadata": metadata, "spec": {}})
    change = {"metadata": {"annotations": {key: value}}}
    cluster.patch(f"{path}/{workload}-group", change)


def test_a_recovery_is_followed(cluster: Simulated, job: Callable[..., Job]) -> None:
    """The watch reports each phase of MindCluster's recovery of this job, and not of other jobs."""
    run = job()
    run.place("a", 0)
    run.pods[0]["metadata"]["annotations"]["hccl/rankIndex"] = "0"
    with run.watched(Recovery.MINDCLUSTER):
        run.write(reset_config("other", RankList=[rank(0)]))
        run.write(reset_config("demo", FaultFlushing=True))
        wait_until(lambda: run.texts, "the first phase")
        run.write(reset_config("demo", RankList=[rank(1)], RestartFaultProcess=True))
        run.wait_for(("fault", 0, 1, False))
        run.write(reset_config("demo", RetryTime=1))
        run.wait_for(("fault", 0, 1, False), ("fault", 0, 1, True))
        for name in ("other", "demo"):
            noted(cluster, name, "ProcessRecoverStatus", "recover-success")
        wait_until(lambda: len(run.texts) == 6, f"the result: {run.texts}")
    assert run.texts == [
        "MindCluster has detected a fault, and waits for other faults",
        "MindCluster lists rank 1: fault",
        "MindCluster restarts the failed processes on their nodes",
        "MindCluster restarts all processes, for the first time",
        "MindCluster no longer lists a failed rank",
        "MindCluster has tried recover, with success",
    ]
