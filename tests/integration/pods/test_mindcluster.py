"""MindCluster's own recovery of a rank in a pod, as the journal has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.launch import Simulated
from mindcluster import RESOURCE, rank, reset_config
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.job import pause_all
from training_jobs.pods import PodJob, pod_job
from training_jobs.record import Record

from rekindle.engines.kubernetes.manifests.ascend import Ascend
from rekindle.engines.kubernetes.manifests.settings import Recovery, WorkloadKind
from rekindle.recovery.faults.classification import EventSource
from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

PAUSE_ALL = pause_all(12)


def test_mindclusters_own_recovery(
    cluster: Simulated, namespace: str, baseline: Record, tmp_path: Path
) -> None:
    """The journal has MindCluster's faulty rank and the result; Rekindle does not act.

    The job ends with success, equals the baseline bit by bit, and leaves no object.
    """
    folders = dict.fromkeys(("reset_config", "data_trace", "driver"), False)
    settings = {"kind": WorkloadKind.ASCENDJOB, "device": RESOURCE, "ascend": Ascend(**folders)}
    pods = settings | {"recovery": Recovery.MINDCLUSTER}
    with pod_job(tmp_path, cluster, *PAUSE_ALL, namespace=namespace, pods=pods) as run:
        recover(run)
        run.release_all()
        assert run.end().outcome == "succeeded", run.story()
        assert run.incidents() == []
        assert_same_training(run.record, baseline)
        assert_samples_once(run.record)
        run.cluster.delete(f"{run.objects_path}/configmaps/reset-config-job")
        run.remove()


def recover(run: PodJob) -> None:
    """Simulate MindCluster's recovery of a rank while all ranks pause."""
    run.wait_pause(12)
    index = {n: run.pod_of(n)["metadata"]["annotations"]["hccl/rankIndex"] for n in (0, 1)}
    listed = 2 * int(index[1]) + 1  # MindCluster numbers ranks by its own index of pods
    path, space = f"{run.objects_path}/configmaps", run.namespace
    fields = {"RankList": [rank(listed)], "RestartFaultProcess": True}
    run.cluster.create(path, reset_config("job", space, **fields))
    run.wait(lambda: run.events_of(journal.HealthEventSeen), "the rank in the journal")
    (event,) = run.events_of(journal.HealthEventSeen)
    assert (event.health_event.source, event.health_event.what) == (
        EventSource.MINDCLUSTER,
        "fault",
    )
    assert (event.health_event.node, event.health_event.device) == (1, 1)
    groups = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{space}/podgroups"
    (group,) = run.cluster.get(groups)["items"]
    noted = {"metadata": {"annotations": {"ProcessRecoverStatus": "retry-success"}}}
    run.cluster.patch(f"{groups}/{group['metadata']['name']}", noted)
    run.cluster.patch(f"{path}/reset-config-job", {"data": reset_config("job", space)["data"]})
    run.wait(lambda: len(run.events_of(journal.HealthEventSeen)) == 2, "the end of the recovery")
    assert run.events_of(journal.HealthEventSeen)[1].health_event.gone
    run.wait(lambda: "with success" in "".join(run.messages), "the result")
