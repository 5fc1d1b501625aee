"""One job is rescheduled for lack of hosts, loses all journals, and loses its workload."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import role
from cluster.launch import Simulated
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.pod_rows import Row, Story, let_go, loss, pauses, run_rows
from training_jobs.pods import PodJob, new_namespace, pod_job
from training_jobs.record import Record
from waiting import bound_s

from rekindle.engines.kubernetes.manifests.render import render
from rekindle.engines.kubernetes.preflight.preflight import needed, useful
from rekindle.errors import JobError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.recovery.policy.policy import Policy

pytestmark = pytest.mark.timeout(300)

# The same limit applies to the pods of the next attempt.
IMPATIENT = Policy(
    max_restarts=0, node_timeout_s=bound_s(10.0), max_reschedules=3, max_reschedules_in_row=3
)


def there_is_no_room(run: PodJob) -> SimpleNamespace:
    """Delete the pod of node 1 while all hosts are cordoned; start the next attempt."""
    doomed, before = run.pod_of(1)["metadata"]["name"], run.workload()["metadata"]["uid"]
    cordon(run.cluster, True)
    with loss(run):
        run.cluster.delete(f"{run.objects_path}/pods/{doomed}")
    let_go(run)
    outcome = run.end().outcome
    fault = run.events_of(journal.FaultSeen)[-1].fault
    left = run.events_of(journal.Isolated)
    cordon(run.cluster, False)
    run.start()
    after = run.workload()["metadata"]["uid"]
    return SimpleNamespace(outcome=outcome, fault=fault, left=left, before=before, after=after)


def cordon(cluster: Simulated, no_more: bool) -> None:
    """Make all hosts unschedulable, or schedulable."""
    for node in cluster.get("/api/v1/nodes")["items"]:
        path = f"/api/v1/nodes/{node['metadata']['name']}"
        cluster.patch(path, {"spec": {"unschedulable": no_more or None}})


def every_journal_is_lost(run: PodJob) -> int:
    """Delete the coordinator with its volume, and change the flow's machine; return the attempt."""
    (pod,) = run.coordinator_pods()
    run.cluster.delete(f"{run.objects_path}/pods/{pod['metadata']['name']}")
    run.wait(lambda: not_answering(run), "the end of the coordinator")
    run.steer(run.folder / "elsewhere")
    run.endpoint = run.engine.launch(attempt=0)
    let_go(run)
    return run.endpoint.attempt


def not_answering(job: PodJob) -> bool:
    """Return whether the coordinator fails to answer."""
    try:
        job.status()
    except JobError:
        return True
    return False


def the_workload_is_removed(run: PodJob) -> SimpleNamespace:
    """Delete the Job together with its pods."""
    before = run.workload()["metadata"]["uid"]
    jobs = f"/apis/batch/v1/namespaces/{run.namespace}/jobs"
    with loss(run):
        run.cluster.delete(f"{jobs}/job", propagationPolicy="Background")
    let_go(run)
    assert run.end().outcome == "succeeded", run.story()
    return SimpleNamespace(before=before, after=run.workload()["metadata"]["uid"])


CROWDED = Row(6, there_is_no_room)
FORGOTTEN = Row(11, every_journal_is_lost)
REMOVED = Row(16, the_workload_is_removed)
ROWS = (CROWDED, FORGOTTEN, REMOVED)


@pytest.fixture(scope="module")
def story(cluster: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Run the job of all rows with the rights of deploy/base only."""
    folder = tmp_path_factory.mktemp("run")
    with new_namespace(cluster) as space:
        settings: dict[str, Any] = {"namespace": space, "policy": IMPATIENT}
        settings["kubeconfig"] = role.flows(cluster, folder / "flows.kubeconfig", space)
        settings["checkpoint_every"] = 5
        with pod_job(folder, cluster, *pauses(ROWS), **settings) as run:
            yield run_rows(run, ROWS)


def test_no_room_for_another_pod(story: Story) -> None:
    """If no host is free, the wait for a pod ends at its limit; the reason names that pod."""
    noted = story.of(CROWDED).noted
    assert noted.outcome == RESCHEDULED
    assert noted.fault.kind is FaultKind.SCHEDULING
    waited = f"no agent joined for node 1 within {IMPATIENT.node_timeout_s:g} s: pod reason"
    assert f"{waited} Unschedulable" in noted.fault.message


def test_the_job_is_placed_anew(story: Story) -> None:
    """The engine suspends and resumes the same Job; the job isolates no host."""
    noted = story.of(CROWDED).noted
    assert noted.after == noted.before
    assert noted.left == []


def test_every_journal_is_lost(story: Story) -> None:
    """After the loss of all journals the placed attempt continues."""
    assert story.of(FORGOTTEN).noted == 1


def test_somebody_removes_the_workload(story: Story) -> None:
    """After the removal of the workload the engine creates another one."""
    noted = story.of(REMOVED).noted
    assert noted.after != noted.before


def test_the_rights_that_are_handed_out_are_enough(story: Story, cluster: Simulated) -> None:
    """The engine uses each listed right and no other right; the server refuses no request."""
    story.assert_succeeded()
    run = story.job
    wanted = render(run.spec, run.pods, secret="-")
    need = {(verb, r.resource) for r in needed(run.pods.kind, wanted) for verb in r.verbs}
    listed = need | {(verb, r.resource) for r in useful(run.pods.kind) for verb in r.verbs}
    user = f"system:serviceaccount:{run.namespace}:{role.ACCOUNT}"
    calls = [call for call in cluster.calls(user=user) if call["resource"] != "namespaces"]
    asked = {(call["verb"], call["resource"]) for call in calls}
    # An apply that creates an object also needs the right to create.
    asked |= {("create", c["resource"]) for c in calls if (c["verb"], c["code"]) == ("patch", 201)}
    # The engine deletes a single pod only if its agent is lost or its host has failed.
    assert need - asked <= {("delete", "pods")}
    assert asked - listed == set()
    assert [call for call in calls if call["code"] == 403] == []


def test_the_end(story: Story, baseline: Record) -> None:
    """The job ends with success, equals the baseline bit by bit, and leaves no object."""
    story.assert_succeeded()
    assert_same_training(story.job.record, baseline)
    assert_samples_once(story.job.record)
