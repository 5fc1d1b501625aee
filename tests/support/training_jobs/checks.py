"""Assertions about the required properties of a recovered run."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rekindle.training.sampler import StepSampler
from training_jobs import BATCH, LENGTH
from training_jobs.job import Job
from training_jobs.record import Record

_TRAINED = ("digest", "buffers", "position", "rate", "updates")


def assert_same_training(
    run: Record, baseline: Record, *, wrong: Mapping[int, int] | None = None
) -> None:
    """Check that all losses and each rank's final state equal the baseline's, bit by bit.

    Each record of a repeated step must also be equal, unless a fault made the step wrong.

    `wrong`: by step, the newest generation in which the step was wrong.
    """
    wrong = wrong or {}
    for rank in range(run.ranks):
        wanted = [baseline.steps(rank)[step]["loss"] for step in range(run.total)]
        assert run.losses(rank) == wanted, f"losses of rank {rank}"
        for line in run.lines(rank):
            is_wrong = line["generation"] <= wrong.get(line["step"], 0)
            same = line["metrics"]["loss"] == wanted[line["step"]]
            assert same or is_wrong, f"rank {rank}: {line}"
    for rank in range(run.ranks):
        ours, theirs = run.result(rank), baseline.result(rank)
        assert {k: ours.get(k) for k in _TRAINED} == {k: theirs[k] for k in _TRAINED}


def assert_samples_once(run: Record) -> None:
    """Check that all steps and ranks use each sample of the sampler's stream exactly once."""
    samplers = [StepSampler(LENGTH, BATCH, seed=3) for _ in range(run.ranks)]
    for rank, sampler in enumerate(samplers):
        sampler.bind(rank, run.ranks)
        steps = run.steps(rank)
        assert sorted(steps) == list(range(run.total))
        for step in range(run.total):
            assert steps[step]["samples"] == sampler.indices(), f"rank {rank}, step {step}"
            sampler.advance()


def assert_pids_kept(run: Record, *, replaced: Collection[int] = ()) -> None:
    """Check that all ranks except the replaced ones keep their first process."""
    for rank in set(range(run.ranks)) - set(replaced):
        assert len(run.lives(rank)) == 1, f"rank {rank} was started anew"
        assert run.result(rank)["pid"] == run.lives(rank)[0]


def assert_recovered(
    job: Job,
    baseline: Record,
    *,
    replaced: Collection[int],
    wrong: Mapping[int, int] | None = None,
) -> None:
    """Check that the job succeeded, equals the baseline, kept its healthy processes, and left none.

    `wrong`: steps that a fault made wrong before the ranks repeated them, see assert_same_training.
    """
    ended = job.end()
    assert ended.outcome == "succeeded", f"{ended}{job.story()}"
    assert_same_training(job.record, baseline, wrong=wrong)
    assert_samples_once(job.record)
    assert_pids_kept(job.record, replaced=replaced)
    assert job.leftovers() == []
    assert all(incident.closed for incident in job.incidents()), job.story()


def steps_lost(job: Job) -> list[int]:
    """Return the number of lost steps of each incident that has recovered."""
    lost = [incident.steps_lost for incident in job.incidents() if incident.closed]
    assert None not in lost, "a rank without a Session restarted"
    return [each or 0 for each in lost]
