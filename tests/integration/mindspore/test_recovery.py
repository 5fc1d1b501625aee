"""MindSpore's jobs: repaired in their processes, and started anew where a process is gone."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mindspore_jobs.job import STEPS, MindSporeJob, assert_same, needs_mindspore
from stores.servers import ENVIRONMENT, rclone

from rekindle.recovery import journal
from rekindle.recovery.node_check.event import NodeChecked
from rekindle.recovery.node_check.evidence import Part
from rekindle.recovery.node_check.verdicts import Health
from rekindle.recovery.policy import Strategy
from rekindle.runtime.protocol import InjectionKind

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
Baseline = Callable[[int], MindSporeJob]


def strategies(job: MindSporeJob) -> list[Strategy]:
    """What was decided, in its order."""
    return [each.strategy for each in job.events_of(journal.Decided)]


def test_damaged_memory_costs_no_process_and_no_step(tmp_path: Path, baseline: Baseline) -> None:
    """Ranks whose memory is damaged at random steps take their state from a peer, and go on."""
    chance = random.Random(0)
    with MindSporeJob(tmp_path, ranks=4) as job:
        job.hold(2)
        pids = job.pids()
        for step in sorted(chance.sample(range(3, STEPS), 4)):
            kind = chance.choice((InjectionKind.UCE, InjectionKind.TORN_UPDATE))
            job.inject(chance.randrange(4), kind, step)
        job.release(2)
        assert job.end() == 0, job.story()
    assert strategies(job) == [Strategy.RETRY] * 4
    assert {incident.steps_lost for incident in job.incidents()} == {0}  # one may hold two of them
    results = job.results()
    assert [results[rank]["pid"] for rank in range(4)] == pids
    assert_same(job, baseline(4))


@pytest.mark.parametrize("after", [0.0, 0.002, 0.006])
def test_a_killed_rank_costs_no_step(tmp_path: Path, baseline: Baseline, after: float) -> None:
    """All ranks are started anew, from the last words that those had who lived."""
    with MindSporeJob(
        tmp_path,
        *("--die", "0:17", "--after", str(after)),
        options=("--max-restarts", "1"),
    ) as job:
        assert job.end() == 0, job.story()
    assert strategies(job) == [Strategy.RESTART]
    (incident,) = job.incidents()
    assert incident.steps_lost == 0, job.story()
    assert_same(job, baseline(2), killed=0)


def test_when_all_states_are_damaged_training_goes_back(tmp_path: Path, baseline: Baseline) -> None:
    """Nobody has a live state: all take the newest snapshot, and do its steps again."""
    with MindSporeJob(tmp_path, options=("--snapshot-every", "5")) as job:
        job.hold(2)
        pids = job.pids()
        for rank in (0, 1):
            job.inject(rank, InjectionKind.UCE, 13)
        job.release(2)
        assert job.end() == 0, job.story()
    formed = job.events_of(journal.Formed)
    assert [each.step for each in formed] == [0, 10], job.story()
    assert [job.results()[rank]["pid"] for rank in (0, 1)] == pids
    assert_same(job, baseline(2))


def test_a_hang_is_named_and_ended(tmp_path: Path, baseline: Baseline) -> None:
    """A rank that does not come to the gate is named with its stack; all are started anew."""
    with MindSporeJob(tmp_path) as job:
        job.hold(2)
        job.inject(1, InjectionKind.HANG, 13)
        job.release(2)
        assert job.end() == 0, job.story()
    assert strategies(job) == [Strategy.HANG_RESTART]
    assert "rank 1 makes no progress" in job.incidents()[0].faults[0].message
    assert_same(job, baseline(2))


def test_a_lost_coordinator_costs_no_process(tmp_path: Path, baseline: Baseline) -> None:
    """Ranks train on without it, and meet the new one with the state they have."""
    with MindSporeJob(tmp_path) as job:
        job.hold(9)
        pids = job.pids()
        job.wait_step(9)
        endpoint = job.directory.endpoint()
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        job.wait(lambda: job.directory.endpoint() != endpoint, "another coordinator")
        job.release(9)
        assert job.end() == 0, job.story()
    assert [job.results()[rank]["pid"] for rank in (0, 1)] == pids
    assert_same(job, baseline(2))


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where checkpoints are: in a directory, and in an object store, which has a server here."""
    if request.param == "directory":
        yield str(tmp_path / "checkpoints")
        return
    with rclone(tmp_path) as server:
        yield server.location()


def test_a_stopped_job_goes_on_from_its_last_step(
    tmp_path: Path, baseline: Baseline, store: str
) -> None:
    """Told to stop, ranks give their newest state; the next attempt does the step behind it."""
    options = ("--snapshot-every", "10", "--checkpoint-dir", store)
    with MindSporeJob(tmp_path, options=options, environment=ENVIRONMENT) as job:
        job.hold(14)
        job.wait_step(14)
        job.client().stop_by_hand(by="a test")
        assert job.end() != 0
        words = job.events_of(journal.Checkpointed)[-1]
        assert words.step == 14, job.story()
        job.release(14)
        job.start()
        assert job.end() == 0, job.story()
    formed = job.events_of(journal.Formed)[-1]
    assert (formed.step, formed.sources) == (14, {"checkpoint": 2})
    assert_same(job, baseline(2))


def test_a_script_without_a_session_is_restarted(tmp_path: Path, baseline: Baseline) -> None:
    """All its ranks are started anew, with a scheduler of their own."""
    with MindSporeJob(tmp_path, "--plain", "--die", "1:11", options=("--max-restarts", "1")) as job:
        assert job.end() == 0, job.story()
    assert strategies(job) == [Strategy.RESTART]
    assert len(list(job.directory.path.glob("logs/scheduler_*.log"))) == 2
    results, wanted = job.results(), baseline(2).results()
    assert [results[r]["digest"] for r in (0, 1)] == [wanted[r]["digest"] for r in (0, 1)]


def test_nodes_are_checked_without_torch(tmp_path: Path, baseline: Baseline) -> None:
    """Where there is no PyTorch a node is measured by other means, and is taken in."""
    options = ("--network-check", "--nnodes", "2", "--nproc-per-node", "1")
    loose = ("--compute-factor", "50", "--link-factor", "50")
    with MindSporeJob(tmp_path, options=(*options, *loose)) as job:
        assert job.end() == 0, job.story()
    checked = job.events_of(NodeChecked)
    assert [each.verdict.health for each in checked] == [Health.HEALTHY] * 2, job.story()
    assert set(checked[0].verdict.seconds) >= {Part.COMPUTE, Part.MEMORY, Part.LINK}
    assert_same(job, baseline(2))


def test_a_callback_that_stops_training_ends_the_job(tmp_path: Path, baseline: Baseline) -> None:
    """The step that it stops behind is the last one, and has a checkpoint; all ends well."""
    with MindSporeJob(tmp_path, "--stop", "17", options=("--checkpoint-every", "10")) as job:
        assert job.end() == 0, job.story()
    assert [each.step for each in job.events_of(journal.Checkpointed)] == [10, 17], job.story()
    seen = {step: loss for _, step, loss, _ in baseline(2).results()[0]["seen"]}
    assert job.losses(0) == {step - 1: loss for step, loss in seen.items() if step <= 17}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (("--stop", "17", "--alone"), "ended its training behind step 17"),
        (("--own-seed",), "begun with other parameters"),
    ],
)
def test_ranks_that_do_not_do_the_same_are_told(
    tmp_path: Path, script: tuple[str, ...], said: str
) -> None:
    """One would wait for the other for ever, or they would train different models."""
    with MindSporeJob(tmp_path, *script) as job:
        assert job.end() == 1, job.story()
    assert said in job.events_of(journal.FaultSeen)[0].fault.message, job.story()


@pytest.mark.parametrize("option", ["--accumulate", "--augment"])
def test_a_killed_rank_costs_no_step_of_other_loops(tmp_path: Path, option: str) -> None:
    """One that updates in every second step, and one whose samples are changed at random.

    The latter with MindSpore's recovery of datasets that is not the fast one.
    """
    with MindSporeJob(tmp_path / "whole", option) as whole:
        assert whole.end() == 0, whole.story()
    script = (option, "--die", "1:16")
    with MindSporeJob(tmp_path / "killed", *script, options=("--max-restarts", "1")) as job:
        assert job.end() == 0, job.story()
    assert [incident.steps_lost for incident in job.incidents()] == [0], job.story()
    assert_same(job, whole, killed=1)


def test_a_killed_scheduler_costs_no_step(tmp_path: Path, baseline: Baseline) -> None:
    """MindSpore would end the ranks because of it some day; the next ones have another."""
    with MindSporeJob(tmp_path, options=("--max-restarts", "1")) as job:
        job.hold(12)
        job.wait_step(12)
        job.scheduler().kill()
        job.wait_event(journal.Decided)
        job.release(12)
        assert job.end() == 0, job.story()
    assert strategies(job) == [Strategy.RESTART]
    assert [each.steps_lost for each in job.incidents()] == [0], job.story()
    assert_same(job, baseline(2))


def test_a_lost_node_costs_no_step(tmp_path: Path, baseline: Baseline) -> None:
    """A spare takes its place; the state comes from the last words of the node that is left."""
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--spares", "1", "--max-restarts", "1")
    with MindSporeJob(tmp_path, options=options) as job:
        job.hold(2)
        job.inject(1, InjectionKind.NODE_LOST, 13)
        job.release(2)
        assert job.end() == 0, job.story()
    assert strategies(job)[-1] is Strategy.RESTART, job.story()
    assert [each.steps_lost for each in job.incidents()] == [0], job.story()
    assert_same(job, baseline(2), killed=1)
