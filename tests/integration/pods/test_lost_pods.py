"""One job in pods loses a rank, its flow, the server, its coordinator, pods and its workload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from cluster.launch import Simulated
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault
from training_jobs.pod_rows import Row, Story, let_go, loss, pauses, run_rows
from training_jobs.pods import PodJob, new_namespace, pod_job
from training_jobs.processes import dead
from training_jobs.record import Record
from training_jobs.rows import ERROR
from waiting import LIMIT_S, bound_s, wait_until

from rekindle import names
from rekindle.engines.kubernetes import engine
from rekindle.errors import JobError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.evidence import NodeCheckLimits
from rekindle.recovery.node_check.verdicts import Health, NodeChecked
from rekindle.recovery.policy.policy import Policy, Strategy

pytestmark = pytest.mark.timeout(300)

ONE_RESTART = Policy(max_restarts=1, hang_timeout_s=LIMIT_S)
LENIENT = NodeCheckLimits(compute_factor=20.0, link_factor=20.0)


def a_rank_is_killed(run: PodJob) -> None:
    """Kill one rank."""
    run.kill(1)
    let_go(run)


def another_process_adopts(run: PodJob) -> SimpleNamespace:
    """Let a process that knows only the job's name steer the job; then kill a rank."""
    known = run.events()
    run.steer(run.folder / "elsewhere")
    alive, found = run.engine.alive(), run.events()
    run.kill(2)
    let_go(run)
    return SimpleNamespace(known=known, alive=alive, found=found, attempt=run.endpoint.attempt)


def the_api_server_restarts(run: PodJob) -> None:
    """Kill a rank while the API server is stopped."""
    killed = psutil.Process(run.pid(1))
    run.cluster.stop_server()
    killed.kill()  # before the others continue and pause in a step that they cannot leave
    let_go(run)
    wait_until(lambda: dead(killed), "the end of the rank")  # without a request to the server
    run.cluster.start_server(deny_for=1.0)


def the_coordinator_is_lost(run: PodJob) -> SimpleNamespace:
    """Delete the coordinator's pod together with its volume.

    Ranks pause until the next coordinator has ended their generation. Otherwise they would pause
    for the next row in a step that they cannot leave.
    """
    known = run.events()
    (pod,) = run.coordinator_pods()
    run.cluster.delete(f"{run.objects_path}/pods/{pod['metadata']['name']}")
    run.wait(lambda: not_answering(run), "the end of the coordinator")
    run.endpoint = run.engine.revive()
    found = run.events()
    joined = len([event for event in known if isinstance(event, journal.NodeJoined)])
    run.wait_event(journal.NodeJoined, joined + run.spec.nodes)
    let_go(run)
    return SimpleNamespace(known=known, found=found)


def the_coordinator_hangs(run: PodJob) -> SimpleNamespace:
    """Stop the coordinator's process. Its container runs on, so Kubernetes does not notice it."""
    (pod,) = run.coordinator_pods()
    address = (pod["status"]["podIP"], names.POD_PORT)
    found = [c for c in psutil.net_connections("tcp") if c.laddr == address]
    (pid,) = {c.pid for c in found if c.status == psutil.CONN_LISTEN}
    joined = len(run.events_of(journal.NodeJoined))
    hanging = psutil.Process(pid)
    hanging.suspend()
    assert run.engine.alive() is None
    run.endpoint = run.engine.revive()
    run.wait_event(journal.NodeJoined, joined + run.spec.nodes)
    let_go(run)
    return SimpleNamespace(uid=pod["metadata"]["uid"], is_dead=dead(hanging))


def not_answering(job: PodJob) -> bool:
    """Return whether the coordinator fails to answer."""
    try:
        job.status()
    except JobError:
        return True
    return False


def a_pod_is_deleted(run: PodJob) -> Path:
    """Delete the pod of node 1; return the file of its output."""
    name, uid = (run.pod_of(1)["metadata"][key] for key in ("name", "uid"))
    lost = run.directory.path / "logs" / f"{name}-{uid[:8]}.log"
    run.wait(lost.exists, "its output")
    with loss(run):
        run.cluster.delete(f"{run.objects_path}/pods/{name}")
    let_go(run)
    return lost


def a_pod_is_evicted(run: PodJob) -> None:
    """Evict the pod of node 1; training continues when the journal has the eviction."""
    pod = run.pod_of(1)["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    run.cluster.create(f"{run.objects_path}/pods/{pod}/eviction", eviction)

    def is_recorded() -> bool:
        return any(e.fault.kind is FaultKind.EVICTION for e in run.events_of(journal.FaultSeen))

    run.wait(is_recorded, "the eviction in the journal")
    let_go(run)


def the_workload_is_removed_alone(run: PodJob) -> set[str]:
    """Delete the Job without its pods; return the names of the output files.

    Rank 0 later raises an error.
    """
    pods = set(run.worker_pods())
    jobs = f"/apis/batch/v1/namespaces/{run.namespace}/jobs"
    run.cluster.delete(f"{jobs}/job", propagationPolicy="Orphan")
    let_go(run)
    assert run.end().outcome == "succeeded", run.story()
    run.wait(lambda: ended(run, pods), "the end of its pods")
    every = (*run.worker_pods().values(), *run.coordinator_pods())
    return {f"{each['metadata']['name']}-{each['metadata']['uid'][:8]}.log" for each in every}


def ended(job: PodJob, pods: set[str]) -> bool:
    """Return whether these pods have ended with success."""
    found = job.worker_pods()
    return all(found[name]["status"]["phase"] == "Succeeded" for name in pods)


KILLED = Row(2, a_rank_is_killed)
ADOPTED = Row(5, another_process_adopts)
RESTARTED = Row(8, the_api_server_restarts)
COORDINATOR = Row(11, the_coordinator_is_lost)
HUNG = Row(13, the_coordinator_hangs)
DELETED = Row(15, a_pod_is_deleted)
EVICTED = Row(17, a_pod_is_evicted)
ORPHANED = Row(20, the_workload_is_removed_alone)
ROWS = (KILLED, ADOPTED, RESTARTED, COORDINATOR, HUNG, DELETED, EVICTED, ORPHANED)
RAISES = Fault(0, "forward", 22, life=0, do="raise")


@pytest.fixture(scope="module")
def story(cluster: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Run the job of all rows, without a spare, with node checks."""
    folder = tmp_path_factory.mktemp("run")
    settings = {"policy": ONE_RESTART, "checked": LENIENT}
    with (
        new_namespace(cluster) as space,
        pod_job(folder, cluster, *pauses(ROWS), RAISES, namespace=space, **settings) as run,
    ):
        yield run_rows(run, ROWS)


def test_a_killed_rank(story: Story) -> None:
    """The agent restarts a killed rank in the same pod; the pods do not change."""
    facts = story.of(KILLED)
    assert [i.strategies for i in facts.incidents] == [[Strategy.RECOVER_IN_PLACE]]
    assert facts.after == facts.before


def test_another_process_adopts_it(story: Story) -> None:
    """A process without local files finds secret, journal and attempt in the cluster.

    The job continues and recovers a killed rank.
    """
    facts = story.of(ADOPTED)
    assert facts.noted.alive is not None
    assert facts.noted.alive.attempt == facts.noted.attempt
    assert facts.noted.found[: len(facts.noted.known)] == facts.noted.known
    assert [i.strategy for i in facts.incidents] == [Strategy.RECOVER_IN_PLACE]
    assert facts.of(journal.JobStarted) == []
    assert len(facts.before) == 2


def test_the_api_server_restarts(story: Story) -> None:
    """A rank recovers without the API server."""
    assert [i.strategy for i in story.of(RESTARTED).incidents] == [Strategy.RECOVER_IN_PLACE]


def test_the_coordinator_is_lost_with_its_volume(story: Story) -> None:
    """The next coordinator gets the journal from the steering process and continues the attempt."""
    facts = story.of(COORDINATOR)
    assert facts.noted.found[: len(facts.noted.known)] == facts.noted.known
    assert [e.attempt for e in story.events if isinstance(e, journal.JobStarted)] == [0]
    (incident,) = facts.incidents
    assert (incident.cause.kind, incident.steps_lost) == (FaultKind.COORDINATOR, 0)


def test_the_coordinator_hangs(story: Story) -> None:
    """The engine ends the pod of a coordinator that does not answer, and the next one continues."""
    facts = story.of(HUNG)
    assert facts.noted.is_dead
    assert facts.noted.uid not in {p["metadata"]["uid"] for p in story.job.coordinator_pods()}
    (incident,) = facts.incidents
    assert (incident.cause.kind, incident.steps_lost) == (FaultKind.COORDINATOR, 0)


def test_a_deleted_pod(story: Story) -> None:
    """Without a spare, the replacement pod joins after a check has found it healthy."""
    facts = story.of(DELETED)
    (incident,) = facts.incidents
    assert (incident.strategy, incident.cause.node) == (Strategy.RECOVER, 1)
    took_over = facts.of(journal.NodeJoined, node=1)[-1]
    spares = [e for e in story.events if isinstance(e, journal.NodeJoined)]
    assert took_over.pid not in {e.pid for e in spares if e.node == names.SPARE}
    (checked,) = facts.of(NodeChecked)
    assert checked.verdict.health is Health.HEALTHY
    first = [e for e in story.events if isinstance(e, NodeChecked)][:2]
    assert {e.verdict.health for e in first} == {Health.HEALTHY}
    assert {e.host for e in (checked, *first)} <= {f"node-{n}" for n in range(6)}


def test_an_evicted_pod(story: Story) -> None:
    """The incident names the eviction, independent of the order of eviction and loss."""
    (incident,) = story.of(EVICTED).incidents
    assert (incident.strategy, incident.cause.kind) == (Strategy.RECOVER, FaultKind.EVICTION)
    assert "EvictionByEvictionAPI" in incident.cause.message


def test_what_pods_put_out_is_here(story: Story) -> None:
    """The flow's machine has the output of the coordinator and of all nodes, with ranks.

    A message names the file of a lost node.
    """
    lost = story.of(DELETED).noted
    assert f"the output of lost node 1 is in {lost}" in story.job.messages
    assert story.of(ORPHANED).noted <= set(story.outputs)
    (text,) = [text for text in story.outputs.values() if f"{ERROR} 22" in text]
    assert text.count(f"[default0]:{ERROR} 22") == 1


def test_somebody_removes_the_workload_alone(story: Story) -> None:
    """The pods of a deleted Job train to the end; the job's removal deletes them."""
    facts = story.of(ORPHANED)
    assert facts.after == facts.before
    assert {i.cause.rank for i in facts.incidents} <= {0}


def test_the_end(story: Story, baseline: Record) -> None:
    """The job ends with success, equals the baseline bit by bit, and leaves no object."""
    story.assert_succeeded()
    assert_same_training(story.job.record, baseline)
    assert_samples_once(story.job.record)


@pytest.mark.parametrize(
    ("image", "reason", "ready_s"),
    [("library/Upper:1", "InvalidImageName", LIMIT_S), ("missing", "ImagePull", 6.0)],
)
def test_an_image_that_is_not_there(
    image: str,
    reason: str,
    ready_s: float,
    tmp_path: Path,
    cluster: Simulated,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launch fails with the reason and leaves no object."""
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path / "home"))
    monkeypatch.setattr(engine, "READY_S", bound_s(ready_s))
    run = PodJob(tmp_path, cluster, namespace=namespace, pods={"image": image})
    with pytest.raises(JobError, match=reason):
        run.start()
    assert run.objects() == []
    run.close()
