"""Checkpoints that are damaged between the attempts of a job are never loaded.

The first attempt writes checkpoints and fails. Each later attempt starts from the contents of the
store, and fails except for the last one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from training_jobs.baselines import Baselines
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault, held
from training_jobs.job import Job

from rekindle.recovery.journal import journal

RANKS = 2
STATE = "state-00000.safetensors"


def flip_a_byte(path: Path) -> None:
    """Change one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def halve(path: Path) -> None:
    """Remove the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "state flipped": lambda checkpoint: flip_a_byte(checkpoint / STATE),
    "state truncated": lambda checkpoint: halve(checkpoint / STATE),
    "state missing": lambda checkpoint: (checkpoint / STATE).unlink(),
    "manifest flipped": lambda checkpoint: flip_a_byte(checkpoint / "manifest.json"),
    "manifest truncated": lambda checkpoint: halve(checkpoint / "manifest.json"),
    "manifest missing": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
}


@dataclass
class Story:
    """A job and its attempts.

    `outcomes` and `events` have an entry for each attempt. `damaged` has the checkpoint of each
    damage. `there` has all checkpoints at the time when none was valid.
    """

    job: Job
    outcomes: list[str] = field(default_factory=list)
    events: list[list[journal.AnyEvent]] = field(default_factory=list)
    damaged: dict[str, Path] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)

    def began(self, attempt: int) -> journal.Formed:
        """Return the first generation of an attempt."""
        return next(e for e in self.events[attempt] if isinstance(e, journal.Formed))

    def skipped(self, attempt: int) -> dict[str, str]:
        """Return the checkpoints that an attempt skipped, each with the reason."""
        found = [e for e in self.events[attempt] if isinstance(e, journal.CheckpointSkipped)]
        return {each.path: each.reason for each in found}


def attempt(story: Story, *checkpoints: int, fails: bool = True) -> None:
    """Run an attempt that fails after it has written these checkpoints."""
    job, before = story.job, len(story.job.events())
    pauses = [Fault(0, "forward", step + 1, life=0, do="pause") for step in checkpoints]
    end = held(Fault(0, "forward", checkpoints[-1] + 1, life=0, do="raise")) if fails else ()
    job.plan(*pauses, *end)
    job.start()
    for number, step in enumerate(checkpoints):
        job.wait_fault(number)
        job.wait(lambda step=step: step in _written(job, before), f"checkpoint {step}")
        job.release(number)
    if fails:
        job.release(len(pauses))
    story.outcomes.append(job.end().outcome)
    story.events.append(job.events()[before:])


def _written(job: Job, before: int) -> set[int]:
    """Return the steps of the checkpoints that the attempt has written."""
    return {e.step for e in job.events()[before:] if isinstance(e, journal.Checkpointed)}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Run four attempts: two with intact checkpoints, then six damaged, then all damaged."""
    folder = tmp_path_factory.mktemp("attempts")
    job = Job(folder, processes=RANKS, snapshot_every=0, checkpoint_every=2)
    story = Story(job)
    try:
        attempt(story, 2, 4, 6, 8, 10, 12)
        attempt(story, 14)
        for (name, damage), checkpoint in zip(DAMAGES.items(), job.checkpoints(), strict=False):
            damage(checkpoint)
            story.damaged[name] = checkpoint
        attempt(story, 4)
        for checkpoint in job.checkpoints():
            if checkpoint not in story.damaged.values():
                flip_a_byte(checkpoint / STATE)
        story.there = set(map(str, job.checkpoints()))
        attempt(story, 2, fails=False)
    finally:
        job.__exit__()
    return story


def test_resume_from_the_newest_checkpoint(story: Story) -> None:
    assert story.outcomes[:2] == ["failed", "failed"]
    assert (story.began(1).step, story.began(1).sources) == (12, {"checkpoint": RANKS})
    assert story.skipped(1) == {}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(story: Story, damage: str) -> None:
    """The attempt skips the damaged checkpoint, and the journal has the reason."""
    assert story.skipped(2)[str(story.damaged[damage])]


def test_the_newest_valid_checkpoint_is_used(story: Story) -> None:
    assert story.outcomes[2] == "failed"
    assert len(story.skipped(2)) == len(DAMAGES)
    assert (story.began(2).step, story.began(2).sources) == (2, {"checkpoint": RANKS})


def test_without_a_valid_checkpoint_the_job_begins_from_the_start(story: Story) -> None:
    """Without a valid checkpoint the job starts from step 0; the journal has the reasons."""
    assert story.skipped(3).keys() == story.there
    assert all(story.skipped(3).values())
    assert story.began(3).sources == {"fresh": RANKS}


def test_the_training_is_that_of_an_undisturbed_run(story: Story, baseline_of: Baselines) -> None:
    assert story.outcomes[3] == "succeeded", story.job.story()
    assert_same_training(story.job.record, baseline_of("ddp", RANKS))
    assert_samples_once(story.job.record)
