"""All jobs of a namespace avoid an isolated host, independent of the machine of their launch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cluster.launch import Simulated
from repository import ROOT
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.pod_rows import Row, Story, let_go, pauses, run_rows
from training_jobs.pods import PodJob, new_namespace, pod_job
from training_jobs.record import Record

from rekindle.engines.kubernetes.manifests.settings import IsolationMode
from rekindle.engines.kubernetes.placement.quarantine import holds, mark_on
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.recovery.policy.policy import Policy, Strategy

pytestmark = pytest.mark.timeout(300)

DEPLOY = ROOT / "deploy"
ISOLATES = Policy(
    strategies=(Strategy.RESCHEDULE_JOB_ISOLATED,), max_reschedules=3, max_reschedules_in_row=3
)
REPAIRS = Policy(strategies=(Strategy.RECOVER,))
OFF_THE_BUS = HealthEvent(source=EventSource.XID, what="79", node=1, device=0, by="a test")


def leave_schedulable(cluster: Simulated, *hosts: str) -> None:
    """Cordon all hosts except these."""
    for node in cluster.get("/api/v1/nodes")["items"]:
        name = node["metadata"]["name"]
        fields = {"spec": {"unschedulable": None if name in hosts else True}}
        cluster.patch(f"/api/v1/nodes/{name}", fields)


def every_host(cluster: Simulated) -> list[str]:
    """Return the names of all hosts."""
    return [node["metadata"]["name"] for node in cluster.get("/api/v1/nodes")["items"]]


def a_host_is_isolated(run: PodJob) -> SimpleNamespace:
    """Report a lost device of node 1, and remove the taint of its host as a user would.

    Only this host and one other are schedulable for the next attempt.
    """
    before, other = run.workload()["metadata"]["uid"], run.pod_of(0)["spec"]["nodeName"]
    run.engine.client(run.endpoint).report(OFF_THE_BUS)
    assert run.end().outcome == RESCHEDULED, run.story()
    (event,) = run.events_of(journal.Isolated)
    bad, joined = str(event.host), len(run.events_of(journal.NodeJoined))
    path = f"/api/v1/nodes/{bad}"
    mark = run.wait(lambda: mark_on(run.cluster.get(path)), "the mark of the host")
    held = holds(run.cluster.get(path), mark)
    run.cluster.patch(path, {"spec": {"taints": None}})
    leave_schedulable(run.cluster, bad, other)
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    hosts = {event.host for event in run.events_of(journal.NodeJoined)[joined:]}
    after = run.workload()["metadata"]["uid"]
    return SimpleNamespace(
        bad=bad, other=other, mark=mark, held=held, hosts=hosts, before=before, after=after
    )


def there_is_no_other_host(run: PodJob) -> SimpleNamespace:
    """Report a lost device of node 1 while no other host is schedulable."""
    messages, hosts = (
        list(run.messages),
        {event.host for event in run.events_of(journal.NodeJoined)},
    )
    host: str = run.pod_of(1)["spec"]["nodeName"]
    run.engine.client(run.endpoint).report(OFF_THE_BUS)
    run.wait(lambda: run.events_of(journal.NodeLeft), "the node to leave")
    let_go(run)
    ended = run.end()
    leave_schedulable(run.cluster, *every_host(run.cluster))
    joined = len(run.events_of(journal.NodeJoined))
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    later = {event.host for event in run.events_of(journal.NodeJoined)[joined:]}
    return SimpleNamespace(messages=messages, hosts=hosts, host=host, ended=ended, later=later)


TAINTED = Row(12, a_host_is_isolated)
ALONE = Row(13, there_is_no_other_host)


@pytest.fixture(scope="module")
def space(cluster: Simulated) -> Iterator[str]:
    """Create the namespace of both jobs, which has one host log."""
    with new_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="module")
def first(
    cluster: Simulated, space: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    """Run a job that isolates a host, with the rights of deploy/nodes."""
    files = ("base/role.yaml", "base/service-account.yaml", "nodes/cluster-role.yaml")
    grant(cluster, space, *files)
    folder = tmp_path_factory.mktemp("first")
    token = cluster.token_for("rekindle-flows", space)
    settings: dict[str, Any] = {
        "namespace": space,
        "policy": ISOLATES,
        "checkpoint_every": 5,
        "pods": {"isolated_hosts": IsolationMode.TAINT},
        "kubeconfig": cluster.kubeconfig_for(token, folder / "config", space),
    }
    with pod_job(folder, cluster, *pauses([TAINTED]), **settings) as run:
        yield run_rows(run, [TAINTED])


@pytest.fixture(scope="module")
def second(
    first: Story, cluster: Simulated, space: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    """Run a job of another machine; the isolated host and two others are schedulable."""
    noted = first.of(TAINTED).noted
    third = next(each for each in every_host(cluster) if each not in (noted.bad, noted.other))
    leave_schedulable(cluster, noted.bad, noted.other, third)
    settings: dict[str, Any] = {
        "namespace": space,
        "policy": REPAIRS,
        "checkpoint_every": 5,
        "pods": {"anti_affinity": True},
    }
    folder = tmp_path_factory.mktemp("second")
    with pod_job(folder, cluster, *pauses([ALONE]), **settings) as run:
        yield run_rows(run, [ALONE])


def grant(cluster: Simulated, namespace: str, *files: str) -> None:
    """Create the rights in deploy/ for the namespace of these tests."""
    root = "/apis/rbac.authorization.k8s.io/v1"
    for one in (each for file in files for each in yaml.safe_load_all((DEPLOY / file).read_text())):
        for subject in one.get("subjects", ()):
            subject["namespace"] = namespace
        if one["kind"] == "ServiceAccount":
            continue
        place = root if one["kind"].startswith("Cluster") else f"{root}/namespaces/{namespace}"
        cluster.create(f"{place}/{one['kind'].lower()}s", one)


def test_the_cluster_keeps_everybody_off_it(first: Story, cluster: Simulated) -> None:
    """With the rights of deploy/nodes the node gets a taint; its mark remains after the job."""
    noted = first.of(TAINTED).noted
    assert noted.held
    assert (noted.mark.by, noted.mark.how) == ("job", IsolationMode.TAINT)
    assert mark_on(cluster.get(f"/api/v1/nodes/{noted.bad}")) == noted.mark


def test_the_job_is_placed_anew_off_the_host(first: Story) -> None:
    """The same Job object runs the next attempt, and avoids the host without its taint."""
    noted = first.of(TAINTED).noted
    assert noted.after == noted.before
    assert noted.hosts
    assert noted.bad not in noted.hosts


def test_another_machine_keeps_off_it(first: Story, second: Story) -> None:
    """A job of another machine in the same namespace avoids the host."""
    noted = second.of(ALONE).noted
    assert first.of(TAINTED).noted.bad not in noted.hosts | noted.later
    assert noted.messages == []


def test_there_is_no_other_host(second: Story) -> None:
    """The job refuses the replacement pod on an isolated host; then it fails with that reason."""
    noted = second.of(ALONE).noted
    assert noted.ended.outcome == "failed"
    assert f"comes from an isolated host, for example {noted.host}" in noted.ended.reason


@pytest.mark.parametrize("which", ["first", "second"])
def test_the_end(which: str, request: pytest.FixtureRequest, baseline: Record) -> None:
    """Both jobs end with success, equal the baseline bit by bit, and leave no object."""
    story: Story = request.getfixturevalue(which)
    story.assert_succeeded()
    assert_same_training(story.job.record, baseline)
    assert_samples_once(story.job.record)
