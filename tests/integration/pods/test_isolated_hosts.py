"""A host that has broken one job is kept from others, whoever launches them from wherever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cluster.launch import Simulated
from repository import ROOT
from training_jobs.checks import assert_same_training
from training_jobs.job import pause_all
from training_jobs.pods import PodJob
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle import names
from rekindle.engines.kubernetes.marks import holds, mark_on
from rekindle.engines.kubernetes.pods import Isolation
from rekindle.recovery import journal
from rekindle.recovery.classification import Sign, Source
from rekindle.recovery.policy import Policy, Strategy
from rekindle.runtime.state import RESCHEDULED

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

DEPLOY = ROOT / "deploy"
PAUSE_ALL = pause_all(12)
POLICY = Policy(
    strategies=(Strategy.RESCHEDULE_JOB_ISOLATED,), max_reschedules=3, max_reschedules_in_row=3
)
OFF_THE_BUS = Sign(source=Source.XID, what="79", node=1, device=0, by="a test")


def isolate_one(job: PodJob) -> str:
    """Have the job find one of its hosts broken; which."""
    job.wait_pause(12)
    job.engine.client(job.endpoint).report(OFF_THE_BUS)
    assert job.end().outcome == RESCHEDULED, job.story()
    (event,) = job.events_of(journal.Isolated)
    return str(event.host)


def hosts_of(job: PodJob) -> set[str]:
    return {event.host for event in job.events_of(journal.NodeJoined)}


@pytest.mark.parametrize("how", soak_but([Isolation.CORDON, Isolation.TAINT], Isolation.TAINT))
def test_the_cluster_keeps_everybody_off_it(
    how: Isolation, job: Callable[..., PodJob], cluster: Simulated, tmp_path: Path
) -> None:
    """With the rights of deploy/nodes the node is marked, while the job goes on elsewhere."""
    grant(cluster, "base/role.yaml", "base/service-account.yaml", "nodes/cluster-role.yaml")
    config = cluster.kubeconfig_for(cluster.token_for("rekindle-flows"), tmp_path / "config")
    run = job(
        *PAUSE_ALL,
        policy=POLICY,
        checkpoint_every=5,
        pods={"isolated_hosts": how},
        kubeconfig=config,
    )
    bad = isolate_one(run)
    run.plan()
    run.start()
    node = cluster.get(f"/api/v1/nodes/{bad}")
    mark = mark_on(node)
    assert mark is not None
    assert holds(node, mark)
    assert (mark.by, mark.how) == ("job", how)
    assert run.end().outcome == "succeeded", run.story()
    assert bad not in {e.host for e in run.events_of(journal.NodeJoined)[-2:]}
    run.remove()
    assert mark_on(cluster.get(f"/api/v1/nodes/{bad}")) == mark


def grant(cluster: Simulated, *files: str) -> None:
    """Hand out the rights in deploy/, in the namespace of these tests."""
    root = "/apis/rbac.authorization.k8s.io/v1"
    for one in (each for file in files for each in yaml.safe_load_all((DEPLOY / file).read_text())):
        for subject in one.get("subjects", ()):
            subject["namespace"] = "default"
        plural = f"{one['kind'].lower()}s"
        if one["kind"] == "ServiceAccount":
            continue
        place = root if one["kind"].startswith("Cluster") else f"{root}/namespaces/default"
        cluster.create(f"{place}/{plural}", one)


def test_another_machine_keeps_off_it(
    job: Callable[..., PodJob],
    baseline: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has never heard of the job that was broken, but launches one in that cluster."""
    first = job(*PAUSE_ALL, policy=POLICY, checkpoint_every=5)
    bad = isolate_one(first)
    first.remove()
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path / "another home"))
    second = job()
    assert second.end().outcome == "succeeded", second.story()
    assert_same_training(second.record, baseline)
    assert bad not in hosts_of(second)
    assert second.told == []
    second.remove()
