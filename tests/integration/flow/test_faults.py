"""A training job of the train flow: faults with and without a flow process, and its end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import acts
import pytest
from flow_jobs import TrainingRun, kill_tree
from prefect_side import Served

from rekindle.recovery.journal.journal import FirstStep, JobStarted, NodeWanted

pytestmark = pytest.mark.timeout(900)

STEPS = ("detected", "decided", "regrouped", "restored", "closed")


def a_rank_that_is_killed(job: TrainingRun) -> None:
    """After SIGKILL of a rank training continues without a lost step."""
    os.kill(job.run.status().ranks[1].pid, signal.SIGKILL)
    job.until_training()


def a_node_that_is_lost_while_no_flow_process_lives(job: TrainingRun) -> None:
    """Without a flow process the coordinator requests a node; the rerun starts it."""
    with job.runner.unaware():
        job.run.process().kill()
        kill_tree(job.run.status().nodes[1].pid)
        job.run.until(lambda: job.run.count(NodeWanted) == 1, "the coordinator wants a node")
    job.until_training()


def a_coordinator_that_dies(job: TrainingRun) -> None:
    """After SIGKILL of the coordinator the flow starts another one; the attempt continues."""
    job.run.process()
    os.kill(job.coordinator(), signal.SIGKILL)
    job.until_training()


def all_of_it_reaches_prefect(job: TrainingRun) -> None:
    """Prefect has each incident once and complete, from any of the flow's processes."""
    run = job.run
    job.gate.touch()
    run.until_state("Completed")
    assert run.count(JobStarted) == 1
    wanted = [(f"rekindle.incident.{step}", number) for number in (1, 2) for step in STEPS]
    run.until(lambda: run.events()[:10] == wanted, "Prefect has all events, each once")
    run.until(lambda: ("rekindle.incident.closed", 3) in run.events(), "the third one is closed")
    assert len(set(run.events())) == len(run.events())
    assert run.states().count("Recovering") >= 2
    table = json.loads(run.artifact("incidents").data)
    assert [(row["fault"].split(",")[0], row["strategy"]) for row in table[:2]] == [
        ("process", "recover-in-place"),
        ("node-lost", "recover"),
    ]
    assert [(row["fault"].split(",")[0], row["lost"]) for row in table[2:]] == [
        ("coordinator-lost", "0")
    ]
    assert run.artifact("progress").data == 100
    assert sorted(run.task_states("supervise")) == ["Completed", "Crashed"]
    assert run.count(FirstStep) == 4


ACTS = [
    a_rank_that_is_killed,
    a_node_that_is_lost_while_no_flow_process_lives,
    a_coordinator_that_dies,
    all_of_it_reaches_prefect,
]


@pytest.fixture(scope="module")
def played(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run one job of two nodes, which loses a rank, a node and its coordinator."""
    job = TrainingRun(served, tmp_path_factory.mktemp("faults") / "gate", nodes=2)
    yield acts.Played(ACTS, job)
    job.gate.touch()


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_faults(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)
