"""A host that has broken one job is kept from others, whoever launches them from wherever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs.checks import assert_same_training
from training_jobs.job import pause_all
from training_jobs.pods import PodJob
from training_jobs.record import Record

from rekindle import names
from rekindle.recovery import journal
from rekindle.recovery.classification import Sign, Source
from rekindle.recovery.policy import Policy, Strategy
from rekindle.runtime.state import RESCHEDULED

pytestmark = pytest.mark.timeout(300)  # a cluster, and a job in its pods

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
