"""Nodes leave their hosts while the job continues; the replacements run on other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cluster.launch import Simulated
from mindcluster import RESOURCE, card, device_info
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.pod_rows import Row, Story, let_go, loss, pauses, run_rows
from training_jobs.pods import PodJob, new_namespace, pod_job
from training_jobs.record import Record

from rekindle import names
from rekindle.engines.kubernetes.manifests.settings import IsolationMode
from rekindle.engines.kubernetes.placement import placement as placing
from rekindle.engines.kubernetes.placement.quarantine import NODES
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.verdict import Urgency
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.evidence import NodeCheckLimits
from rekindle.recovery.node_check.verdicts import Health, NodeChecked
from rekindle.recovery.policy.policy import Strategy

pytestmark = pytest.mark.timeout(300)

OFF_THE_BUS = HealthEvent(source=EventSource.XID, what="79", node=1, device=0, by="a test")
RESET = "80C78008"  # RestartNPU


def condition(cluster: Simulated, name: str, kind: str, status: str) -> None:
    """Set a condition of a cluster node."""
    node = cluster.get(f"{NODES}/{name}")
    conditions = [each for each in node["status"]["conditions"] if each["type"] != kind]
    conditions.append({"type": kind, "status": status, "message": "said so"})
    cluster.patch(f"{NODES}/{name}/status", {"status": {"conditions": conditions}})


def events_by_code(run: PodJob) -> dict[str, journal.HealthEventSeen]:
    """Return the signs in the journal by their codes."""
    return {event.health_event.what: event for event in run.events_of(journal.HealthEventSeen)}


def leave(run: PodJob) -> SimpleNamespace:
    """Report a lost device of node 1 and wait until the node leaves."""
    doomed, other = (run.pod_of(node) for node in (1, 0))
    left = len(run.events_of(journal.NodeLeft))
    run.engine.client(run.endpoint).report(OFF_THE_BUS)
    run.wait(lambda: len(run.events_of(journal.NodeLeft)) > left, "the node to leave")
    let_go(run)
    return SimpleNamespace(
        host=doomed["spec"]["nodeName"],
        uid=doomed["metadata"]["uid"],
        other=other["metadata"]["uid"],
    )


def a_host_has_little_memory(run: PodJob) -> str:
    """Report memory pressure of the host of node 1."""
    host: str = run.pod_of(1)["spec"]["nodeName"]
    condition(run.cluster, host, "MemoryPressure", "True")
    run.wait(lambda: "MemoryPressure=True" in events_by_code(run), "the sign in the journal")
    let_go(run)
    return host


def a_kernel_hangs(run: PodJob) -> str:
    """Report a kernel deadlock of the host of node 1."""
    host: str = run.pod_of(1)["spec"]["nodeName"]
    condition(run.cluster, host, "KernelDeadlock", "True")
    run.wait(lambda: "KernelDeadlock=True" in events_by_code(run), "the sign in the journal")
    let_go(run)
    return host


def a_node_leaves(run: PodJob) -> SimpleNamespace:
    """Let node 1 leave without a spare pod."""
    return leave(run)


def a_host_is_lost(run: PodJob) -> SimpleNamespace:
    """Stop a host without the coordinator; the server keeps its pods."""
    (coordinator,) = run.coordinator_pods()
    hosts = {node: run.pod_of(node)["spec"]["nodeName"] for node in (0, 1)}
    node, host = next(at for at in hosts.items() if at[1] != coordinator["spec"]["nodeName"])
    run.cluster.kill_node(host)
    let_go(run)
    return SimpleNamespace(node=node, host=host)


PRESSURE = Row(3, a_host_has_little_memory)
DEADLOCK = Row(6, a_kernel_hangs)
LEFT = Row(11, a_node_leaves)
LOST = Row(17, a_host_is_lost)
ROWS = (PRESSURE, DEADLOCK, LEFT, LOST)


@pytest.fixture(scope="module")
def story(cluster: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Run the job of these rows: no spare, one node on a host, isolated hosts are cordoned."""
    pods = {"isolated_hosts": IsolationMode.CORDON, "anti_affinity": True}
    folder = tmp_path_factory.mktemp("run")
    with (
        pytest.MonkeyPatch.context() as patch,
        new_namespace(cluster) as space,
        pod_job(folder, cluster, *pauses(ROWS), namespace=space, pods=pods) as run,
    ):
        patch.setattr(placing, "OVERDUE_S", 1.0)
        yield run_rows(run, ROWS)


def test_a_condition_that_need_not_stop_the_job(story: Story) -> None:
    """A condition with low urgency is in the journal and causes no incident."""
    facts = story.of(PRESSURE)
    (event,) = [
        e for e in facts.of(journal.HealthEventSeen) if e.health_event.what == "MemoryPressure=True"
    ]
    assert event.urgency is Urgency.WATCH
    assert facts.incidents == []


def test_a_condition_that_ends_a_node(story: Story) -> None:
    """A condition that ends a node moves the node to another host."""
    facts = story.of(DEADLOCK)
    first = facts.incidents[0]
    assert (first.cause.kind, first.strategy) == (FaultKind.NODE, Strategy.RECOVER)
    assert first.cause.node == 1
    assert facts.of(journal.NodeJoined)[-1].host != facts.noted


def test_a_new_pod_takes_the_place_of_one_that_leaves(story: Story) -> None:
    """The replacement of a node that leaves runs on another host; the other pod does not change."""
    facts = story.of(LEFT)
    assert [each.strategies for each in facts.incidents] == [[Strategy.RECOVER]]
    assert facts.of(journal.NodeJoined)[-1].host != facts.noted.host
    assert facts.noted.other in facts.after.values()
    assert facts.noted.uid not in facts.after.values()


def test_a_lost_host(story: Story) -> None:
    """The engine replaces the pod of a lost host, although the server never ends that pod."""
    facts = story.of(LOST)
    assert facts.incidents[0].strategy is Strategy.RECOVER
    assert facts.of(journal.NodeJoined, node=facts.noted.node)[-1].host != facts.noted.host


def test_the_end(story: Story, baseline: Record) -> None:
    """The job ends with success, equals the baseline bit by bit, and leaves no object."""
    story.assert_succeeded()
    assert_same_training(story.job.record, baseline)
    assert_samples_once(story.job.record)


def a_pod_is_deleted(run: PodJob) -> set[int]:
    """Delete the pod of node 1 while a spare waits; return the spares' processes."""
    run.wait(lambda: len(run.events_of(journal.NodeJoined)) == 3, "the spare")
    with loss(run):
        run.cluster.delete(f"{run.objects_path}/pods/{run.pod_of(1)['metadata']['name']}")
    let_go(run)
    return {e.pid for e in run.events_of(journal.NodeJoined, node=names.SPARE)}


def a_node_leaves_to_a_spare(run: PodJob) -> SimpleNamespace:
    """Let node 1 leave; the spare is the replacement of the earlier deleted pod."""
    run.wait(lambda: len(run.events_of(journal.NodeJoined, node=names.SPARE)) == 2, "a spare")
    spares = run.events_of(journal.NodeJoined, node=names.SPARE)
    left = leave(run)
    left.spare = spares[-1].pid
    return left


def a_chip_has_to_be_reset(run: PodJob) -> str:
    """Report faults of a chip of node 1, of another pod's chip, and of another host's chip."""
    cluster = run.cluster
    pods = {node: run.pod_of(node) for node in (0, 1)}
    hosts = {node: pod["spec"]["nodeName"] for node, pod in pods.items()}
    for pod in pods.values():
        chips: dict[str, Any] = {"huawei.com/AscendReal": "Ascend910-6,Ascend910-7"}
        path = f"{run.objects_path}/pods/{pod['metadata']['name']}"
        cluster.patch(path, {"metadata": {"annotations": chips}})
    used = {pod["spec"]["nodeName"] for pod in run.worker_pods().values()}
    elsewhere = min({f"node-{number}" for number in range(6)} - used)
    for thing in (
        device_info(elsewhere, card(7, RESET, "RestartNPU")),
        device_info(hosts[0], card(5, RESET, "RestartNPU")),
        device_info(hosts[1], card(7, RESET, "RestartNPU")),
    ):
        cluster.create("/api/v1/namespaces/kube-system/configmaps", thing)
    run.wait(lambda: RESET in events_by_code(run), "the sign in the journal")
    run.wait(lambda: any(e.fault.code == RESET for e in run.events_of(journal.FaultSeen)), "it")
    let_go(run)
    return hosts[1]


SPARED = Row(4, a_pod_is_deleted)
HANDED_OVER = Row(11, a_node_leaves_to_a_spare)
CHIP = Row(18, a_chip_has_to_be_reset)
SPARE_ROWS = (SPARED, HANDED_OVER, CHIP)


@pytest.fixture(scope="module")
def spared(cluster: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Run the job of these rows: with a spare, with devices and with node checks."""
    folder = tmp_path_factory.mktemp("run")
    settings: dict[str, Any] = {
        "spares": 1,
        "checked": NodeCheckLimits(compute_factor=20.0, link_factor=20.0),
        "pods": {"device": RESOURCE},
    }
    with (
        new_namespace(cluster) as space,
        pod_job(folder, cluster, *pauses(SPARE_ROWS), namespace=space, **settings) as run,
    ):
        yield run_rows(run, SPARE_ROWS)


def test_a_deleted_pod_and_a_spare(spared: Story) -> None:
    """The spare replaces the deleted pod; the node checks find all hosts healthy."""
    facts = spared.of(SPARED)
    (incident,) = facts.incidents
    assert (incident.strategy, incident.cause.node) == (Strategy.RECOVER, 1)
    assert facts.of(journal.NodeJoined, node=1)[-1].pid in facts.noted
    checks = [e for e in spared.events if isinstance(e, NodeChecked)][:3]
    assert len(checks) == 3
    assert {each.verdict.health for each in checks} == {Health.HEALTHY}
    assert {each.host for each in checks} <= {f"node-{number}" for number in range(6)}


def test_a_spare_takes_the_place_of_a_node_that_leaves(spared: Story) -> None:
    """The spare replaces a node that leaves, and the engine creates a new spare on another host."""
    facts = spared.of(HANDED_OVER)
    assert [each.strategies for each in facts.incidents] == [[Strategy.RECOVER]]
    (left,) = facts.of(journal.NodeLeft)
    joined = [e for e in spared.events if isinstance(e, journal.NodeJoined) and e.seq > left.seq]
    assert (joined[0].node, joined[0].pid) == (1, facts.noted.spare)
    assert facts.noted.host not in {event.host for event in joined}
    assert facts.noted.uid not in facts.after.values()


def test_a_chip_that_has_to_be_reset(spared: Story) -> None:
    """The incident has the code and the device; chips of other pods and hosts cause no sign."""
    facts = spared.of(CHIP)
    events = [event.health_event for event in facts.of(journal.HealthEventSeen)]
    assert {(each.what, each.node, each.device) for each in events} == {(RESET, 1, 1)}
    changes = [(each.gone, each.by) for each in events]
    assert changes == [(False, "mindcluster"), (True, "its reset")]
    (incident,) = facts.incidents
    assert (incident.cause.kind, incident.cause.code) == (FaultKind.DEVICE, RESET)
    assert (incident.cause.node, incident.cause.device) == (1, 1)
    assert incident.cause.host == facts.noted


def test_the_end_with_spares(spared: Story, baseline: Record) -> None:
    """The job ends with success, equals the baseline bit by bit, and leaves no object."""
    spared.assert_succeeded()
    assert_same_training(spared.job.record, baseline)
    assert_samples_once(spared.job.record)
