"""MindSpore scripts with other loops than one plain step after the other, and with errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from mindspore_jobs.baselines import Baseline
from mindspore_jobs.job import MindSporeJob, assert_same, assert_same_results, needs_mindspore

from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.recovery.node_check.verdicts import Health, NodeChecked
from rekindle.recovery.policy.policy import Strategy

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]


def test_a_killed_rank_costs_no_step_of_other_loops(tmp_path: Path, baseline: Baseline) -> None:
    """A killed rank loses no step of a loop that updates in every second step.

    The loop changes its samples at random, so that MindSpore uses its slow recovery of the dataset.
    A callback stops the training. The step before the stop is the last one, and has a checkpoint.
    """
    script = ("--accumulate", "--augment", "--stop", "27")
    options = ("--max-restarts", "1", "--checkpoint-every", "10")
    with MindSporeJob(tmp_path, *script, "--die", "1:16:0", options=options) as job:
        assert job.end() == 0, job.story()
    assert [incident.steps_lost for incident in job.incidents()] == [0], job.story()
    first, *_, last = [each.step for each in job.events_of(journal.Checkpointed)]
    assert (first, last) == (10, 27), job.story()  # step 20 may have none
    assert_same(job, baseline(2, *script), unwritten={1: 1})


def test_a_script_without_a_session_is_restarted(tmp_path: Path, baseline: Baseline) -> None:
    """All ranks of a script without a Session get new processes and a new scheduler."""
    script = ("--plain", "--die", "1:11:0")
    with MindSporeJob(tmp_path, *script, options=("--max-restarts", "1")) as job:
        assert job.end() == 0, job.story()
    assert [each.strategy for each in job.events_of(journal.Decided)] == [Strategy.RESTART]
    assert len(list(job.directory.path.glob("logs/scheduler_*.log"))) == 2
    assert_same_results(job, baseline(2))


def test_a_lost_node_costs_no_step(tmp_path: Path, baseline: Baseline) -> None:
    """A spare replaces a lost node; the state comes from the final checkpoint of the other node.

    Without PyTorch, the node check measures the nodes by other means and finds them healthy.
    """
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--spares", "1", "--max-restarts", "1")
    options += ("--network-check", "--compute-factor", "50", "--link-factor", "50")
    with MindSporeJob(tmp_path, options=options) as job:
        job.hold(2)
        job.inject(1, InjectionKind.NODE_LOST, 13)
        job.release(2)
        assert job.end() == 0, job.story()
    checked = job.events_of(NodeChecked)
    assert len(checked) >= 2, job.story()
    assert {each.verdict.health for each in checked} == {Health.HEALTHY}, job.story()
    assert set(checked[0].verdict.seconds) >= {
        Measurement.COMPUTE,
        Measurement.MEMORY,
        Measurement.LINK,
    }
    decided = [each.strategy for each in job.events_of(journal.Decided)]
    assert decided[-1] is Strategy.RESTART, job.story()
    assert [each.steps_lost for each in job.incidents()] == [0], job.story()
    assert_same(job, baseline(2), unwritten={1: 1})


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (("--stop", "17", "--alone"), "ended its training after step 17"),
        (("--own-seed",), "started with other parameters"),
    ],
)
def test_ranks_that_do_not_do_the_same_are_told(
    tmp_path: Path, script: tuple[str, ...], text: str
) -> None:
    """Ranks with different ends or seeds get an error.

    Otherwise one would wait for the other without end, or they would train different models.
    """
    with MindSporeJob(tmp_path, *script) as job:
        assert job.end() == 1, job.story()
    assert text in job.events_of(journal.FaultSeen)[0].fault.message, job.story()
