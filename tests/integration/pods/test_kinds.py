"""Each kind of workload runs a job through lost pods, left hosts and reschedules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from cluster.launch import Simulated
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.pod_rows import Row, Story, let_go, loss, pauses, run_rows
from training_jobs.pods import PodJob, new_namespace, pod_job
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.engines.kubernetes.manifests.render import adapter
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.recovery.policy.policy import Policy, Strategy

pytestmark = pytest.mark.timeout(300)

OFF_THE_BUS = HealthEvent(source=EventSource.XID, what="79", node=1, device=0, by="a test")
ISOLATED, SAME = Strategy.RESCHEDULE_JOB_ISOLATED, Strategy.RESCHEDULE_JOB


def a_pod_is_deleted(run: PodJob) -> SimpleNamespace:
    """Delete the pod of node 1."""
    doomed, other = (run.pod_of(node)["metadata"] for node in (1, 0))
    with loss(run):
        run.cluster.delete(f"{run.objects_path}/pods/{doomed['name']}")
    let_go(run)
    return SimpleNamespace(uid=doomed["uid"], other=other["uid"])


def a_node_leaves(run: PodJob) -> SimpleNamespace:
    """Report a lost device of node 1; the job continues."""
    doomed, other = (run.pod_of(node) for node in (1, 0))
    run.engine.client(run.endpoint).report(OFF_THE_BUS)
    run.wait(lambda: run.events_of(journal.NodeLeft), "the node to leave")
    let_go(run)
    uids = {"uid": doomed["metadata"]["uid"], "other": other["metadata"]["uid"]}
    return SimpleNamespace(host=doomed["spec"]["nodeName"], **uids)


def the_job_is_rescheduled(run: PodJob) -> SimpleNamespace:
    """Report a lost device of node 1 and start the next attempt."""
    before, joined = run.workload()["metadata"]["uid"], len(run.events_of(journal.NodeJoined))
    isolated = len(run.events_of(journal.Isolated))
    run.engine.client(run.endpoint).report(OFF_THE_BUS)
    assert run.end().outcome == RESCHEDULED, run.story()
    left = {event.host for event in run.events_of(journal.Isolated)[isolated:]}
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    return SimpleNamespace(
        before=before,
        after=run.workload()["metadata"]["uid"],
        left=left,
        hosts={event.host for event in run.events_of(journal.NodeJoined)[joined:]},
    )


DELETED = Row(4, a_pod_is_deleted)
LEFT = Row(9, a_node_leaves)
PLACED = Row(16, the_job_is_rescheduled)


@dataclass(frozen=True)
class Case:
    """A kind, and the strategy that reschedules its job; None: no reschedule."""

    kind: WorkloadKind
    by: Strategy | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}-{self.by.value}" if self.by else self.kind.value

    @property
    def follows(self) -> bool:
        """Return whether later pods avoid a host that the job leaves."""
        return adapter(self.kind).follows

    @property
    def rows(self) -> tuple[Row, ...]:
        """The events of the job; a recovery handles each of them except the reschedule."""
        return (DELETED, *([LEFT] if self.follows else []), *([PLACED] if self.by else []))

    @property
    def policy(self) -> Policy:
        """The policy recovers the node once for each event; then it reschedules the job."""
        recovered = len(self.rows) - (self.by is not None)
        allowed = (Strategy.RECOVER, *([self.by] if self.by else []))
        limits = {"max_reschedules": 3, "max_reschedules_in_row": 3}
        return Policy(strategies=allowed, max_recoveries=recovered, **limits)


def _possible(kind: WorkloadKind, by: Strategy | None) -> bool:
    return by is not SAME or adapter(kind).suspend is not None


KINDS = [kind for kind in WorkloadKind if kind is not WorkloadKind.INDEXED_JOB]
CASES = [Case(kind, by) for kind in KINDS for by in (None, ISOLATED, SAME) if _possible(kind, by)]
ALWAYS = (
    Case(WorkloadKind.JOBSET),
    Case(WorkloadKind.VOLCANO_JOB),
    Case(WorkloadKind.ASCENDJOB, ISOLATED),
    Case(WorkloadKind.TRAINJOB, ISOLATED),
    Case(WorkloadKind.PYTORCHJOB, SAME),
)


def cases(row: Row) -> list[Any]:
    """Return the cases with this row; most of them run only with the soak marker."""
    met = [case for case in CASES if row in case.rows]
    return soak_but(met, *(case for case in ALWAYS if case in met))


@pytest.fixture(scope="module")
def story_of(
    cluster: Simulated, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Story]:
    """Return a function that runs the job of a case once and returns its story."""

    @functools.cache
    def run(case: Case) -> Story:
        folder = tmp_path_factory.mktemp("run")
        settings = {"policy": case.policy, "pods": {"kind": case.kind}, "checkpoint_every": 5}
        with (
            new_namespace(cluster) as space,
            pod_job(folder, cluster, *pauses(case.rows), namespace=space, **settings) as job,
        ):
            return run_rows(job, case.rows)

    return run


@pytest.mark.parametrize("case", cases(DELETED), ids=str)
def test_a_deleted_pod(case: Case, story_of: Callable[[Case], Story]) -> None:
    """The kind's controller creates another pod, which joins the running job."""
    facts = story_of(case).of(DELETED)
    (incident,) = facts.incidents
    assert (incident.strategy, incident.cause.node) == (Strategy.RECOVER, 1)
    assert facts.noted.other in facts.after.values()
    assert facts.noted.uid not in facts.after.values()


@pytest.mark.parametrize("case", cases(LEFT), ids=str)
def test_a_node_leaves(case: Case, story_of: Callable[[Case], Story]) -> None:
    """The replacement pod is on another host, because the engine patched the workload."""
    facts = story_of(case).of(LEFT)
    assert [incident.strategies for incident in facts.incidents] == [[Strategy.RECOVER]]
    assert facts.of(journal.NodeJoined)[-1].host != facts.noted.host
    assert facts.noted.other in facts.after.values()
    assert facts.noted.uid not in facts.after.values()


@pytest.mark.parametrize("case", cases(PLACED), ids=str)
def test_the_job_is_placed_anew(case: Case, story_of: Callable[[Case], Story]) -> None:
    """The job is rescheduled as the same object, or away from the isolated host."""
    noted = story_of(case).of(PLACED).noted
    if case.by is SAME:
        assert noted.after == noted.before
    else:
        assert noted.left
        assert not noted.left & noted.hosts


@pytest.mark.parametrize("case", cases(DELETED), ids=str)
def test_the_end(case: Case, story_of: Callable[[Case], Story], baseline: Record) -> None:
    """The job ends with success, equals the baseline bit by bit, and leaves no object."""
    story = story_of(case)
    story.assert_succeeded()
    assert_same_training(story.job.record, baseline)
    assert_samples_once(story.job.record)
