"""A node leaves its host while the job goes on: what comes in its place is elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.job import pause_all
from training_jobs.pods import PodJob
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.engines.kubernetes.pods import Isolation, Kind
from rekindle.recovery import journal
from rekindle.recovery.classification import Sign, Source
from rekindle.recovery.policy import Policy, Strategy

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

PAUSE_ALL = pause_all(12)
POLICY = Policy(strategies=(Strategy.RECOVER,))


def leave(run: PodJob) -> tuple[str, str]:
    """Have a device of node 1 fall off the bus; return the host that is left, and the pod's uid."""
    run.wait_pause(12)
    doomed = run.pod_of(1)
    gone = Sign(source=Source.XID, what="79", node=1, device=0, by="a test")
    run.engine.client(run.endpoint).report(gone)
    run.wait(lambda: run.events_of(journal.NodeLeft), "the node to leave")
    run.release_all()
    return doomed["spec"]["nodeName"], doomed["metadata"]["uid"]


def assert_repaired(run: PodJob, baseline: Record) -> None:
    """To the bit, without a restart."""
    assert run.end().outcome == "succeeded", run.story()
    assert [each.strategy for each in run.incidents()] == [Strategy.RECOVER]
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)


@pytest.mark.parametrize(
    "pods",
    soak_but(
        [
            {"kind": Kind.ASCENDJOB},  # its pods follow a patch
            {"kind": Kind.PYTORCHJOB},  # as these
            {"isolated_hosts": Isolation.CORDON},
        ],
        {"kind": Kind.ASCENDJOB},
        {"isolated_hosts": Isolation.CORDON},
    ),
)
def test_a_new_pod_takes_its_place(
    pods: dict[str, Any], job: Callable[..., PodJob], baseline: Record
) -> None:
    """There is none in reserve; the other pod is not touched."""
    run = job(*PAUSE_ALL, policy=POLICY, pods=pods)
    run.wait_pause(12)
    other = run.pod_of(0)["metadata"]["uid"]
    host, uid = leave(run)
    assert_repaired(run, baseline)
    assert run.events_of(journal.NodeJoined)[-1].host != host
    uids = {pod["metadata"]["uid"] for pod in run.worker_pods().values()}
    assert other in uids
    assert uid not in uids
    run.remove()


def test_a_spare_takes_its_place(job: Callable[..., PodJob], baseline: Record) -> None:
    """A pod is made anew for it, which waits in its turn; on the host that was left none does."""
    run = job(*PAUSE_ALL, policy=POLICY, spares=1)
    run.wait(lambda: len(run.events_of(journal.NodeJoined)) == 3, "the spare")
    host, uid = leave(run)
    assert_repaired(run, baseline)
    joined = run.events_of(journal.NodeJoined)
    assert joined[3].node == 1
    assert host not in {event.host for event in joined[3:]}
    assert uid not in {pod["metadata"]["uid"] for pod in run.worker_pods().values()}
    run.remove()


@pytest.mark.parametrize("cluster", [{"nodes": 2}], indirect=True)
def test_there_is_no_other_host(job: Callable[..., PodJob]) -> None:
    """What comes is refused twice; then it is given up, with the reason, and not waited for."""
    run = job(*PAUSE_ALL, policy=POLICY, pods={"anti_affinity": True})
    host, _ = leave(run)
    ended = run.end()
    assert ended.outcome == "failed", run.story()
    assert f"comes from a host that is isolated, as {host}" in ended.reason
    run.remove()
