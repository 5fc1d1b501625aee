"""Whoever steers a job in pods, its coordinator and the API server may go: the job goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cluster.launch import Simulated
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.job import pause_all
from training_jobs.pods import NAMESPACE, PodJob
from training_jobs.processes import dead
from training_jobs.record import Record
from waiting import wait_until

from rekindle.errors import JobError
from rekindle.recovery import journal
from rekindle.recovery.classification import Sign, Source
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Policy, Strategy
from rekindle.runtime.state import RESCHEDULED

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

PAUSE_ALL = pause_all(12)
JOB = "/apis/batch/v1/namespaces/default/jobs/job"


def assert_ended_well(job: PodJob, baseline: Record) -> None:
    """To the bit, with nothing left."""
    assert job.end().outcome == "succeeded", job.story()
    assert_same_training(job.record, baseline)
    assert_samples_once(job.record)
    job.remove()


def test_another_process_adopts_it(
    job: Callable[..., PodJob], baseline: Record, tmp_path: Path
) -> None:
    """It knows the job's name and no more: secret, journal and attempt are in the cluster."""
    run = job(*PAUSE_ALL)
    run.wait_pause(12)
    known, pods = run.events(), set(run.worker_pods())
    run.steer(tmp_path / "elsewhere")
    alive = run.engine.alive()
    assert alive is not None
    assert alive.attempt == run.endpoint.attempt
    assert run.events()[: len(known)] == known
    run.release_all()
    run.kill(2)
    assert_ended_well(run, baseline)
    assert len([e for e in run.events() if isinstance(e, journal.JobStarted)]) == 1
    assert len(pods) == 2


def test_the_api_server_restarts(
    job: Callable[..., PodJob], cluster: Simulated, baseline: Record
) -> None:
    """Training does not notice; a fault meanwhile is answered without it."""
    run = job(*PAUSE_ALL)
    run.wait_pause(12)
    pids = [run.pid(rank) for rank in range(4)]
    cluster.stop_server()
    run.release_all()
    killed = psutil.Process(pids[1])
    killed.kill()
    wait_until(lambda: dead(killed), "the end of the rank")  # without asking the server
    cluster.start_server(deny_for=1.0)
    assert_ended_well(run, baseline)
    assert [i.strategy for i in run.incidents()] == [Strategy.RECOVER_IN_PLACE]


def test_the_coordinator_is_lost_with_its_volume(
    job: Callable[..., PodJob], baseline: Record
) -> None:
    """The next one gets the journal from whoever steers the job, and goes on with the attempt."""
    run = job(*PAUSE_ALL)
    run.wait_pause(12)
    known = run.events()
    (pod,) = run.coordinator_pods()
    run.cluster.delete(f"{NAMESPACE}/pods/{pod['metadata']['name']}")
    run.wait(lambda: not_answering(run), "the end of the coordinator")
    run.endpoint = run.engine.revive()
    assert run.events()[: len(known)] == known
    run.release_all()
    assert_ended_well(run, baseline)
    assert [e.attempt for e in run.events_of(journal.JobStarted)] == [0]
    (incident,) = run.incidents()
    assert (incident.cause.kind, incident.steps_lost) == (Kind.COORDINATOR, 0)


def test_every_journal_is_lost(
    job: Callable[..., PodJob], baseline: Record, tmp_path: Path
) -> None:
    """The coordinator's with its volume, the flow's with its machine: the attempt goes on."""
    policy = Policy(strategies=(Strategy.RESCHEDULE_JOB,), max_reschedules=3)
    run = job(*PAUSE_ALL, policy=policy, checkpoint_every=5)
    run.wait_pause(12)
    gone = Sign(source=Source.XID, what="79", node=1, device=0, by="a test")
    run.engine.client(run.endpoint).report(gone)
    assert run.end().outcome == RESCHEDULED, run.story()
    run.plan(*(dataclasses.replace(each, life=2) for each in pause_all(14)))
    run.start()
    run.wait_pause(14)
    (pod,) = run.coordinator_pods()
    run.cluster.delete(f"{NAMESPACE}/pods/{pod['metadata']['name']}")
    run.wait(lambda: not_answering(run), "the end of the coordinator")
    run.steer(tmp_path / "elsewhere")
    run.endpoint = run.engine.launch(attempt=0)
    assert run.endpoint.attempt == 1
    run.release_all()
    assert_ended_well(run, baseline)


def not_answering(job: PodJob) -> bool:
    try:
        job.status()
    except JobError:
        return True
    return False


@pytest.mark.parametrize("strategy", [Strategy.RESCHEDULE_JOB, Strategy.RESCHEDULE_JOB_ISOLATED])
def test_the_job_is_placed_anew(
    strategy: Strategy, job: Callable[..., PodJob], baseline: Record
) -> None:
    """The Job is suspended and goes on, off the host that is to be left: it is the same Job."""
    policy = Policy(strategies=(strategy,), max_reschedules=3, max_reschedules_in_row=3)
    run = job(*PAUSE_ALL, policy=policy, checkpoint_every=5)
    run.wait_pause(12)
    gone = Sign(source=Source.XID, what="79", node=1, device=0, by="a test")  # off the bus
    run.engine.client(run.endpoint).report(gone)
    assert run.end().outcome == RESCHEDULED, run.story()
    before = run.workload()["metadata"]["uid"]
    left = {e.host for e in run.events_of(journal.Isolated)}
    run.plan()
    run.start()
    assert_ended_well_after(run, baseline, before)
    hosts = {e.host for e in run.events_of(journal.NodeJoined)[-2:]}
    assert bool(left) == (strategy is Strategy.RESCHEDULE_JOB_ISOLATED)
    assert not left & hosts


def assert_ended_well_after(job: PodJob, baseline: Record, uid: object) -> None:
    assert job.end().outcome == "succeeded", job.story()
    assert job.workload()["metadata"]["uid"] == uid
    assert_ended_well(job, baseline)


def test_somebody_removes_the_workload(job: Callable[..., PodJob], baseline: Record) -> None:
    """Its nodes are lost with it, and it is made anew."""
    run = job(*PAUSE_ALL, checkpoint_every=5)
    run.wait_pause(12)
    before = run.workload()["metadata"]["uid"]
    run.cluster.delete(JOB, propagationPolicy="Background")
    run.release_all()
    assert run.end().outcome == "succeeded", run.story()
    assert run.workload()["metadata"]["uid"] != before
    assert_ended_well(run, baseline)


def test_somebody_removes_the_workload_alone(job: Callable[..., PodJob], baseline: Record) -> None:
    """Its pods go on without an owner, and in the end they go as well."""
    run = job(*PAUSE_ALL)
    run.wait_pause(12)
    pods = set(run.worker_pods())
    run.cluster.delete(JOB, propagationPolicy="Orphan")
    run.release_all()
    assert run.end().outcome == "succeeded", run.story()
    run.wait(lambda: ended(run, pods), "the end of its pods")
    assert_ended_well(run, baseline)


def ended(job: PodJob, pods: set[str]) -> bool:
    return all(job.worker_pods()[name]["status"]["phase"] == "Succeeded" for name in pods)
