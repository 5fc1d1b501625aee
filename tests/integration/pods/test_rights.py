"""What the engine asks of the API server, what the list of rights says, what is handed out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import role
from cluster.launch import Simulated
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.job import pause_all
from training_jobs.pods import PodJob
from training_jobs.record import Record

from rekindle.engines.kubernetes.manifests import render
from rekindle.engines.kubernetes.rights import needed, useful
from rekindle.recovery.classification import Sign, Source
from rekindle.recovery.policy import Policy, Strategy
from rekindle.runtime.state import RESCHEDULED

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

USER = f"system:serviceaccount:default:{role.ACCOUNT}"


def test_the_rights_that_are_handed_out_are_enough(
    job: Callable[..., PodJob], cluster: Simulated, baseline: Record, tmp_path: Path
) -> None:
    """With the Role of deploy/ alone, a job begins, is placed anew, ends and is removed.

    All that the list calls needed is asked for, and nothing that is not in the list.
    """
    flows = role.flows(cluster, tmp_path / "flows.kubeconfig")
    strategies = (Strategy.RESCHEDULE_JOB,)
    policy = Policy(strategies=strategies, max_reschedules=3, max_reschedules_in_row=3)
    run = job(*pause_all(12), policy=policy, checkpoint_every=5, kubeconfig=flows)
    run.wait_pause(12)
    gone = Sign(source=Source.XID, what="79", node=1, device=0, by="a test")
    run.engine.client(run.endpoint).report(gone)
    assert run.end().outcome == RESCHEDULED, run.story()
    run.plan()
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)
    run.remove()

    wanted = render(run.spec, run.pods, secret="-")
    need = {(verb, r.resource) for r in needed(run.pods.kind, wanted) for verb in r.verbs}
    listed = need | {(verb, r.resource) for r in useful(run.pods.kind) for verb in r.verbs}
    calls = [call for call in cluster.calls(user=USER) if call["resource"] != "namespaces"]
    asked = {(call["verb"], call["resource"]) for call in calls}
    # What is applied and was not there is created, which is a right of its own.
    asked |= {("create", c["resource"]) for c in calls if (c["verb"], c["code"]) == ("patch", 201)}
    # A single pod is deleted where its agent is lost and it runs on, or its host is dead.
    assert need - asked == {("delete", "pods")}
    assert asked - listed == set()
    assert [call for call in calls if call["code"] == 403] == []
