"""One job is rescheduled for want of room, loses every journal, and loses its workload."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import role
from cluster.launch import Simulated
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.pod_rows import Row, Story, let_go, pauses, run_rows
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

# The pods of the attempt that follows need as long as any.
IMPATIENT = Policy(node_timeout_s=bound_s(10.0), max_reschedules=3, max_reschedules_in_row=3)


def there_is_no_room(run: PodJob) -> SimpleNamespace:
    """The pod of node 1 is deleted while all hosts are cordoned; the next attempt is placed."""
    doomed, before = run.pod_of(1)["metadata"]["name"], run.workload()["metadata"]["uid"]
    cordon(run.cluster, True)
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
    """The coordinator loses its volume, and the flow its machine; return the attempt found."""
    (pod,) = run.coordinator_pods()
    run.cluster.delete(f"{run.objects_path}/pods/{pod['metadata']['name']}")
    run.wait(lambda: not_answering(run), "the end of the coordinator")
    run.steer(run.folder / "elsewhere")
    run.endpoint = run.engine.launch(attempt=0)
    let_go(run)
    return run.endpoint.attempt


def not_answering(job: PodJob) -> bool:
    """Whether the coordinator does not answer."""
    try:
        job.status()
    except JobError:
        return True
    return False


def the_workload_is_removed(run: PodJob) -> SimpleNamespace:
    """The Job is deleted, and its pods with it."""
    before = run.workload()["metadata"]["uid"]
    jobs = f"/apis/batch/v1/namespaces/{run.namespace}/jobs"
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
    """The job of all rows, steered with the rights of deploy/base alone."""
    folder = tmp_path_factory.mktemp("run")
    with new_namespace(cluster) as space:
        settings: dict[str, Any] = {"namespace": space, "policy": IMPATIENT}
        settings["kubeconfig"] = role.flows(cluster, folder / "flows.kubeconfig", space)
        settings["checkpoint_every"] = 5
        with pod_job(folder, cluster, *pauses(ROWS), **settings) as run:
            yield run_rows(run, ROWS)


def test_no_room_for_another_pod(story: Story) -> None:
    """The wait has an end, and its reason names the pod that did not start."""
    noted = story.of(CROWDED).noted
    assert noted.outcome == RESCHEDULED
    assert noted.fault.kind is FaultKind.SCHEDULING
    waited = f"no agent joined for node 1 within {IMPATIENT.node_timeout_s:g} s: pod reason"
    assert f"{waited} Unschedulable" in noted.fault.message


def test_the_job_is_placed_anew(story: Story) -> None:
    """It is suspended and resumed: it is the same Job, and no host is left."""
    noted = story.of(CROWDED).noted
    assert noted.after == noted.before
    assert noted.left == []


def test_every_journal_is_lost(story: Story) -> None:
    """The attempt that is placed continues."""
    assert story.of(FORGOTTEN).noted == 1


def test_somebody_removes_the_workload(story: Story) -> None:
    """Its nodes are lost with it, and the engine makes another one."""
    noted = story.of(REMOVED).noted
    assert noted.after != noted.before


def test_the_rights_that_are_handed_out_are_enough(story: Story, cluster: Simulated) -> None:
    """The engine uses every right of the list, no other right, and the server refuses none."""
    story.assert_succeeded()
    run = story.job
    wanted = render(run.spec, run.pods, secret="-")
    need = {(verb, r.resource) for r in needed(run.pods.kind, wanted) for verb in r.verbs}
    listed = need | {(verb, r.resource) for r in useful(run.pods.kind) for verb in r.verbs}
    user = f"system:serviceaccount:{run.namespace}:{role.ACCOUNT}"
    calls = [call for call in cluster.calls(user=user) if call["resource"] != "namespaces"]
    asked = {(call["verb"], call["resource"]) for call in calls}
    # What is applied and was not there is created, which is a right of its own.
    asked |= {("create", c["resource"]) for c in calls if (c["verb"], c["code"]) == ("patch", 201)}
    # A single pod is deleted where its agent is lost and it runs on, or its host is dead.
    assert need - asked <= {("delete", "pods")}
    assert asked - listed == set()
    assert [call for call in calls if call["code"] == 403] == []


def test_the_end(story: Story, baseline: Record) -> None:
    """The job ended well, is the baseline to the bit, and leaves nothing."""
    story.assert_succeeded()
    assert_same_training(story.job.record, baseline)
    assert_samples_once(story.job.record)
