"""Texts about checkpoints that a job skipped, wrote more rarely, or removed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rekindle.recovery.journal.journal import (
    AnyEvent,
    Checkpointed,
    CheckpointInterval,
    CheckpointLeftOut,
    CheckpointsPruned,
    Ended,
    FirstStep,
    JobStarted,
    decode,
    encode,
)
from rekindle.reporting import timeline
from rekindle.reporting.event_text import sentence
from rekindle.reporting.summary import markdown_report, summarize

TOLD: list[AnyEvent] = [
    JobStarted(job_id="job", attempt=0, nodes=1, processes_per_node=1, pid=7),
    FirstStep(generation=1, step=1),
    CheckpointLeftOut(step=20, reason="the store was busy with the checkpoint of step 10"),
    Checkpointed(step=10, path="there", bytes=10, seconds=9.0),
    CheckpointInterval(steps=60, seconds=30.2, reason="one takes 9.0 s to write"),
    CheckpointsPruned(removed=((5, 1), (4, 1)), error="the disk is read-only"),
    Ended(outcome="succeeded", reason="all is done", finished=100),
]
HISTORY = [msgspec.structs.replace(e, seq=n, at=float(n)) for n, e in enumerate(TOLD, start=1)]


def test_each_has_a_sentence() -> None:
    """The sentence of each checkpoint event has the fact and its reason."""
    assert [sentence(event) for event in HISTORY[2:6]] == [
        "No checkpoint of step 20: the store was busy with the checkpoint of step 10",
        "Checkpoint of step 10 is at there (10 B in 9.00 s)",
        "The job now writes a checkpoint every 60 steps (about 30 s): one takes 9.0 s to write",
        "The job removed the checkpoints of steps 5, 4; the disk is read-only",
    ]
    assert [decode(encode(event)) for event in HISTORY] == HISTORY


def test_the_report_and_the_picture(tmp_path: Path) -> None:
    """The report names the skipped steps, and the timeline accepts these events."""
    text = markdown_report(summarize("job", HISTORY), resumed="", logs="logs")
    assert "The job skipped 1 due checkpoints (of step 20)" in text
    none = markdown_report(summarize("job", HISTORY[:2]), resumed="", logs="logs")
    assert "due checkpoints" not in none
    picture = tmp_path / "timeline.png"
    timeline.draw(HISTORY, {}, picture)
    assert picture.stat().st_size > 0
