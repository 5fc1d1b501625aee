"""Every kind of workload carries a job through lost pods and reschedules, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.job import pause_all
from training_jobs.pods import NAMESPACE, PodJob
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.engines.kubernetes.manifests import adapter
from rekindle.engines.kubernetes.pods import Kind
from rekindle.recovery import journal
from rekindle.recovery.classification import Sign, Source
from rekindle.recovery.policy import Policy, Strategy
from rekindle.runtime.state import RESCHEDULED

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods
KINDS = [kind for kind in Kind if kind is not Kind.INDEXED_JOB]

PAUSE_ALL = pause_all(12)


def placed_by(strategy: Strategy) -> Policy:
    return Policy(strategies=(strategy,), max_reschedules=3, max_reschedules_in_row=3)


def assert_ended_well(job: PodJob, baseline: Record) -> None:
    """To the bit, with nothing left."""
    assert job.end().outcome == "succeeded", job.story()
    assert_same_training(job.record, baseline)
    assert_samples_once(job.record)
    job.remove()


@pytest.mark.parametrize("kind", soak_but(KINDS, Kind.JOBSET, Kind.VOLCANO_JOB, Kind.TRAINJOB))
def test_a_deleted_pod(kind: Kind, job: Callable[..., PodJob], baseline: Record) -> None:
    """The kind's controller makes another one, which joins the job that goes on."""
    run = job(*PAUSE_ALL, pods={"kind": kind})
    run.wait_pause(12)
    doomed, other = (run.pod_of(node)["metadata"] for node in (1, 0))
    run.cluster.delete(f"{NAMESPACE}/pods/{doomed['name']}")
    run.release_all()
    assert run.end().outcome == "succeeded", run.story()
    (incident,) = run.incidents()
    assert (incident.strategy, incident.cause.node) == (Strategy.RECOVER, 1)
    stayed = {pod["metadata"]["uid"] for pod in run.worker_pods().values()}
    assert other["uid"] in stayed
    assert doomed["uid"] not in stayed
    assert_ended_well(run, baseline)


def place_anew(run: PodJob) -> None:
    """Have an attempt end at step 12, and launch the next."""
    run.wait_pause(12)
    gone = Sign(source=Source.XID, what="79", node=1, device=0, by="a test")  # off the bus
    run.engine.client(run.endpoint).report(gone)
    assert run.end().outcome == RESCHEDULED, run.story()
    run.plan()
    run.start()
    assert run.end().outcome == "succeeded", run.story()


@pytest.mark.parametrize("kind", soak_but(KINDS, Kind.ASCENDJOB, Kind.TRAINJOB))
def test_a_host_is_left(kind: Kind, job: Callable[..., PodJob], baseline: Record) -> None:
    """The job is placed anew by the kind's own means, off the host that is isolated."""
    policy = placed_by(Strategy.RESCHEDULE_JOB_ISOLATED)
    run = job(*PAUSE_ALL, pods={"kind": kind}, policy=policy, checkpoint_every=5)
    place_anew(run)
    left = {e.host for e in run.events_of(journal.Isolated)}
    assert left
    assert not left & {e.host for e in run.events_of(journal.NodeJoined)[-2:]}
    assert_ended_well(run, baseline)


@pytest.mark.parametrize(
    "kind", soak_but([kind for kind in KINDS if adapter(kind).suspend_patch()], Kind.PYTORCHJOB)
)
def test_placed_anew(kind: Kind, job: Callable[..., PodJob], baseline: Record) -> None:
    """The object is suspended and goes on; it is the same one."""
    policy = placed_by(Strategy.RESCHEDULE_JOB)
    run = job(*PAUSE_ALL, pods={"kind": kind}, policy=policy, checkpoint_every=5)
    run.wait_pause(12)
    before = run.workload()["metadata"]["uid"]
    place_anew(run)
    assert run.workload()["metadata"]["uid"] == before
    assert_ended_well(run, baseline)
