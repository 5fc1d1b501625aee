"""Pods and hosts that are lost: training goes on, to the bit, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.launch import Simulated
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault
from training_jobs.job import pause_all
from training_jobs.pods import NAMESPACE, PodJob
from training_jobs.record import Record
from waiting import LIMIT_S

from rekindle import names
from rekindle.engines.kubernetes import engine, placing
from rekindle.errors import JobError
from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.node_check.event import NodeChecked
from rekindle.recovery.node_check.evidence import Limits
from rekindle.recovery.node_check.verdicts import Health
from rekindle.recovery.policy import Policy, Strategy
from rekindle.runtime.state import RESCHEDULED

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

PAUSE_ALL = pause_all(12)
ONE_RESTART = Policy(max_restarts=1, hang_timeout_s=90.0)


def assert_recovered(job: PodJob, baseline: Record) -> None:
    """It ended well, is the baseline to the bit, and leaves nothing."""
    assert job.end().outcome == "succeeded", job.story()
    assert_same_training(job.record, baseline)
    assert_samples_once(job.record)
    job.remove()


def uids(job: PodJob) -> set[str]:
    return {pod["metadata"]["uid"] for pod in job.worker_pods().values()}


def test_undisturbed(job: Callable[..., PodJob], baseline: Record) -> None:
    run = job()
    assert_recovered(run, baseline)
    assert run.incidents() == []


def test_killed_rank(job: Callable[..., PodJob], baseline: Record) -> None:
    """Its agent starts it anew, in the same pod: Kubernetes need not know."""
    run = job(Fault(1, "backward", 9))
    run.wait_event(journal.FirstStep)
    before = uids(run)
    assert run.end().outcome == "succeeded", run.story()
    assert [i.strategy for i in run.incidents()] == [Strategy.RECOVER_IN_PLACE]
    assert uids(run) == before
    assert_recovered(run, baseline)


def test_what_pods_put_out_is_here(job: Callable[..., PodJob]) -> None:
    """The coordinator's and that of all nodes, with ranks; of a lost node it is said where."""
    run = job(*PAUSE_ALL, Fault(0, "forward", 18, do="raise"), policy=ONE_RESTART)
    run.wait_pause(12)
    name, uid = (run.pod_of(1)["metadata"][key] for key in ("name", "uid"))
    folder = run.directory.path / "logs"
    lost = folder / f"{name}-{uid[:8]}.log"
    run.wait(lost.exists, "its output")
    run.cluster.delete(f"{NAMESPACE}/pods/{name}")
    run.release_all()
    assert run.end().outcome == "succeeded", run.story()
    assert f"the output of lost node 1 is in {lost}" in run.told
    pods = (*run.worker_pods().values(), *run.coordinator_pods())
    run.steer()  # anew: the files are whole then
    found = {path.name: path.read_text() for path in folder.iterdir()}
    for pod in (each["metadata"] for each in pods):
        assert f"{pod['name']}-{pod['uid'][:8]}.log" in found
    (text,) = [text for text in found.values() if "ValueError: injected into step 18" in text]
    assert text.count("[default0]:ValueError: injected into step 18") == 1
    run.remove()


@pytest.mark.parametrize("spares", [0, 1])
def test_deleted_pod(spares: int, job: Callable[..., PodJob], baseline: Record) -> None:
    """A spare takes over at once; without one the pod that comes in its place does, if healthy."""
    run = job(*PAUSE_ALL, spares=spares, checked=Limits(compute_factor=20.0, link_factor=20.0))
    run.wait_pause(12)
    doomed = run.pod_of(1)["metadata"]["name"]
    run.cluster.delete(f"{NAMESPACE}/pods/{doomed}")
    run.release_all()
    assert_recovered(run, baseline)
    (incident,) = run.incidents()
    assert (incident.strategy, incident.cause.node) == (Strategy.RECOVER, 1)
    took_over = run.events_of(journal.NodeJoined, node=1)[-1]
    waited = {e.pid for e in run.events_of(journal.NodeJoined, node=names.SPARE)}
    assert (took_over.pid in waited) == bool(spares)
    checks = run.events_of(NodeChecked)
    assert len(checks) == 3, "two pods and the third, whichever it is"
    assert {each.verdict.health for each in checks} == {Health.HEALTHY}
    assert {each.host for each in checks} <= {"node-0", "node-1", "node-2"}


def test_evicted_pod(job: Callable[..., PodJob], baseline: Record) -> None:
    """The incident says who took the place away, whether that or the loss was heard of first."""
    run = job(*PAUSE_ALL)
    run.wait_pause(12)
    pod = run.pod_of(1)["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    run.cluster.create(f"{NAMESPACE}/pods/{pod}/eviction", eviction)

    def told() -> bool:
        return any(e.fault.kind is Kind.EVICTION for e in run.events_of(journal.FaultSeen))

    run.wait(told, "the eviction in the journal")
    run.release_all()
    assert_recovered(run, baseline)
    (incident,) = run.incidents()
    assert (incident.strategy, incident.cause.kind) == (Strategy.RECOVER, Kind.EVICTION)
    assert "EvictionByEvictionAPI" in incident.cause.message


def test_no_room_for_another_pod(
    job: Callable[..., PodJob], cluster: Simulated, baseline: Record
) -> None:
    """The wait has an end, and what comes then says what it was waited for."""
    # As long as the pods of another attempt need, too.
    policy = Policy(node_timeout_s=10.0, max_reschedules=1, max_reschedules_in_row=1)
    run = job(*PAUSE_ALL, policy=policy, checkpoint_every=5)
    run.wait_pause(12)
    doomed = run.pod_of(1)["metadata"]["name"]
    cordon(cluster, True)
    run.cluster.delete(f"{NAMESPACE}/pods/{doomed}")
    run.release_all()
    assert run.end().outcome == RESCHEDULED, run.story()
    fault = run.events_of(journal.FaultSeen)[-1].fault
    assert fault.kind is Kind.SCHEDULING
    assert "no node came as node 1 within 10 s: pod reason Unschedulable" in fault.message
    cordon(cluster, False)
    run.plan()
    run.start()
    assert_recovered(run, baseline)


def cordon(cluster: Simulated, no_more: bool) -> None:
    for node in cluster.get("/api/v1/nodes")["items"]:
        path = f"/api/v1/nodes/{node['metadata']['name']}"
        cluster.patch(path, {"spec": {"unschedulable": no_more or None}})


@pytest.mark.parametrize(
    ("image", "reason", "ready_s"),
    [("library/Upper:1", "InvalidImageName", LIMIT_S), ("missing", "ImagePull", 12.0)],
)
def test_an_image_that_is_not_there(
    image: str,
    reason: str,
    ready_s: float,
    tmp_path: Path,
    cluster: Simulated,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it cannot be it is said at once, else after a while; then nothing is left."""
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path / "home"))
    monkeypatch.setattr(engine, "READY_S", ready_s)
    run = PodJob(tmp_path, cluster, pods={"image": image})
    with pytest.raises(JobError, match=reason):
        run.start()
    assert run.objects() == []
    run.close()


def test_lost_host(
    job: Callable[..., PodJob],
    cluster: Simulated,
    baseline: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pods never end by themselves; the one of a lost node is replaced all the same."""
    monkeypatch.setattr(placing, "OVERDUE_S", 1.0)
    run = job(*PAUSE_ALL, pods={"anti_affinity": True})
    run.wait_pause(12)
    (coordinator,) = run.coordinator_pods()
    hosts = {node: run.pod_of(node)["spec"]["nodeName"] for node in (0, 1)}
    lost, host = next(at for at in hosts.items() if at[1] != coordinator["spec"]["nodeName"])
    cluster.kill_node(host)
    run.release_all()
    assert_recovered(run, baseline)
    assert run.incidents()[0].strategy is Strategy.RECOVER
    assert run.events_of(journal.NodeJoined, node=lost)[-1].host != host
