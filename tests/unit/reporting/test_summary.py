"""Summary, report and timeline of a job, and the records for them."""

from __future__ import annotations

import enum
import itertools
import logging
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from rekindle.names import SPARE
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import (
    AnyEvent,
    Checkpointed,
    CheckpointFailed,
    CheckpointSkipped,
    Decided,
    Ended,
    Event,
    FaultSeen,
    FinalCheckpoint,
    FirstStep,
    Formed,
    IncidentFold,
    JobStarted,
    NodeJoined,
    NodeLeft,
    NodeWanted,
    RanksStarted,
    Restored,
    SpareLost,
    Stopping,
    incidents,
)
from rekindle.recovery.policy.policy import Strategy
from rekindle.reporting import timeline
from rekindle.reporting.event_text import incident_row, level, resumed_text, resumes, sentence
from rekindle.reporting.step_records import StepRecord, effective, read_records, sample_records
from rekindle.reporting.summary import (
    last_failure,
    markdown_report,
    newest_checkpoint,
    summarize,
)
from rekindle.reporting.timeline import parts_of


def events(*timed: tuple[float, AnyEvent]) -> list[AnyEvent]:
    """Number events and set their times (seconds)."""
    return [
        msgspec.structs.replace(event, seq=seq, at=at)
        for seq, (at, event) in enumerate(timed, start=1)
    ]


def started(attempt: int = 1) -> JobStarted:
    """Return the start of an attempt with two nodes and one rank on each node."""
    return JobStarted(job_id="train-1", attempt=attempt, nodes=2, processes_per_node=1, pid=7)


def fault(kind: FaultKind = FaultKind.PROCESS, *, at: float, traceback: str = "") -> Fault:
    """Return a fault of rank 1."""
    text = f"rank 1: {kind.value}"
    return Fault(kind=kind, message=text, rank=1, node=1, finished=30, traceback=traceback, at=at)


def decided(strategy: Strategy, reason: str, *, at: float) -> Decided:
    """Return a decision about the fault at `at`."""
    return Decided(incident=1, strategy=strategy, reason=reason, fault=fault(at=at))


RUN = events(
    (100.0, started()),
    (100.5, RanksStarted(ranks=(0, 1), restart=0)),
    (101.0, Formed(generation=1, world_size=2, step=0, sources={"fresh": 2}, newest=0)),
    (101.5, Restored(generation=1)),
    (102.0, FirstStep(generation=1, step=1)),
    (112.0, FaultSeen(incident=1, fault=fault(at=111.9))),
    (112.0, decided(Strategy.RECOVER, "rank 1: process; others wait", at=111.9)),
    (
        113.0,
        Formed(
            incident=1,
            generation=2,
            world_size=2,
            step=25,
            sources={"snapshot": 1, "peer": 1},
            newest=30,
        ),
    ),
    (113.5, Restored(incident=1, generation=2)),
    (114.0, FirstStep(incident=1, generation=2, step=26)),
    (124.0, Ended(outcome="succeeded", reason="all ranks ended", finished=75)),
)


def test_the_summary_accounts_for_all_the_time() -> None:
    """The times for start, recovery, repetition and training add up to the total time."""
    summary = summarize("train-1", RUN)
    assert summary.wall_s == 24.0
    assert summary.starting_s == 2.0
    assert summary.recovering_s == 2.0
    assert summary.steps_lost == 5
    assert summary.repeating_s == 20.0 * 5 / 80
    assert summary.training_s + summary.repeating_s == 20.0
    assert summary.goodput == summary.training_s / 24.0


def test_the_lost_steps_of_a_script_without_a_session_are_unknown() -> None:
    """The summary and the report name no number of lost steps after a restart of such a script."""
    script = events(
        (100.0, started()),
        (112.0, FaultSeen(incident=1, fault=fault(at=111.9))),
        (112.0, decided(Strategy.RESTART, "rank 1: process; all ranks restart", at=111.9)),
        (
            113.0,
            Formed(incident=1, generation=1, world_size=2, step=0, sources={"script": 2}, newest=0),
        ),
        (113.0, FirstStep(incident=1, generation=1, step=0)),
        (124.0, Ended(outcome="succeeded", reason="all ranks ended", finished=0)),
    )
    summary = summarize("train-1", script)
    assert summary.steps_lost is None
    assert "| unknown |" in markdown_report(summary, resumed="", logs="")


def test_time_between_attempts_is_time_to_start() -> None:
    """The time from the end of an attempt to the next first step counts as start time."""
    again = events(
        *((event.at, event) for event in RUN[:-1]),
        (124.0, Ended(outcome="stopped", reason="cancelled", finished=75)),
        (130.0, started(2)),
        (131.0, Formed(generation=3, world_size=2, step=70, sources={"checkpoint": 2}, newest=0)),
        (132.0, FirstStep(generation=3, step=71)),
        (133.0, Ended(outcome="succeeded", reason="all ranks ended", finished=80)),
    )
    summary = summarize("train-1", again)
    assert summary.attempts == 2
    assert summary.starting_s == 2.0 + 8.0
    assert summary.outcome == "succeeded"


def test_overlapping_incidents_are_counted_once() -> None:
    """Time with two open incidents counts once; an incident that never closes lasts to the end."""
    run = events(
        (0.0, started()),
        (1.0, FirstStep(generation=1, step=1)),
        (5.0, FaultSeen(incident=1, fault=fault(at=5.0))),
        (6.0, CheckpointFailed(incident=2, fault=fault(FaultKind.STORAGE, at=6.0))),
        (7.0, decided(Strategy.FAIL, "no strategy is left", at=5.0)),
        (9.0, Ended(outcome="failed", reason="no strategy is left", finished=30)),
    )
    assert summarize("train-1", run).recovering_s == 4.0


def test_a_failure_shows_the_first_traceback() -> None:
    """The report of a failed job shows the first traceback and the reason of the failure."""
    run = events(
        (0.0, started()),
        (1.0, FaultSeen(incident=1, fault=fault(FaultKind.LINK, at=1.0))),
        (
            1.1,
            FaultSeen(
                incident=1, fault=fault(FaultKind.USER_CODE, at=0.9, traceback="Traceback 1")
            ),
        ),
        (
            1.2,
            FaultSeen(
                incident=1, fault=fault(FaultKind.USER_CODE, at=1.2, traceback="Traceback 2")
            ),
        ),
        (1.3, decided(Strategy.FAIL, "0 of 0 restarts are used", at=1.2)),
        (2.0, Ended(outcome="failed", reason="0 of 0 restarts are used", finished=0)),
    )
    text = markdown_report(summarize("train-1", run), resumed="", logs="logs")
    assert "Traceback 1" in text
    assert "Traceback 2" not in text
    assert "0 of 0 restarts are used" in text
    assert "no goodput" in text


def test_the_report_tells_each_incident() -> None:
    """The report has strategy, times, lost steps, state source and reason of each incident."""
    text = markdown_report(summarize("train-1", RUN), resumed="", logs="logs")
    row = next(line for line in text.splitlines() if line.startswith("| 1 |"))
    for part in ("01-01 00:01:52+00:00", "process, rank 1", "recover", "2.00 s", "| 5 |"):
        assert part in row
    for part in ("Regrouped after 1000 ms", "restored after 1500 ms", "from a snapshot"):
        assert part in text
    assert "1. Rank 1: process; others wait." in text


def test_a_job_without_its_end_is_unfinished() -> None:
    """A journal without an end is the journal of an unfinished job."""
    summary = summarize("train-1", RUN[:-1])
    assert summary.outcome == "unfinished"
    assert attempts.end_of(RUN[:-1]) is None


def test_a_new_attempt_says_where_it_resumes() -> None:
    """The description of a new attempt has the step, the source, and the path of the checkpoint."""
    again = events(
        (1.0, started()),
        (2.0, Checkpointed(step=20, path="saved/step-20", bytes=1, seconds=0.1)),
        (3.0, started(2)),
        (3.1, CheckpointSkipped(path="saved/step-30", reason="manifest missing")),
        (4.0, Formed(generation=2, world_size=2, step=20, sources={"checkpoint": 2}, newest=0)),
    )
    assert resumes(attempts.newest(again))
    source = "2 ranks read their state from a checkpoint"
    assert resumed_text(again) == f"Attempt 2 resumes after step 20: {source} (saved/step-20)"
    assert not resumes(attempts.newest(RUN))


def test_missing_nodes_are_those_that_never_came_or_went() -> None:
    """A node is missing until it joins the newest attempt, and again after its loss."""
    join = [(1.0, NodeJoined(node=node, address="a", pid=1)) for node in (0, 1)]
    assert attempts.nodes_missing(events((0.0, started()))) == [0, 1]
    assert attempts.nodes_missing(events((0.0, started()), *join)) == []
    lost = events((0.0, started()), *join, (2.0, NodeWanted(node=1)))
    assert attempts.nodes_missing(lost) == [1]
    assert attempts.nodes_missing([*lost, *events((3.0, started(2)), join[0])]) == [1]


def test_missing_spares_are_those_that_do_not_wait() -> None:
    """A spare is missing if it became a node or was lost; a spare that joins twice counts once."""
    begin = (0.0, msgspec.structs.replace(started(), spares=2))
    wait = [(1.0, NodeJoined(node=SPARE, address="a", pid=pid)) for pid in (7, 8)]
    nodes = [(1.0, NodeJoined(node=node, address="a", pid=node)) for node in (0, 1)]
    assert attempts.nodes_missing(events(begin, *nodes)) == [SPARE, SPARE]
    assert attempts.nodes_missing(events(begin, *nodes, *wait)) == []
    became = (2.0, NodeJoined(node=1, address="a", pid=7))
    died = (3.0, SpareLost(address="a", pid=8, left=0))
    assert attempts.nodes_missing(events(begin, *nodes, *wait, became)) == [SPARE]
    assert attempts.nodes_missing(events(begin, *nodes, *wait, became, died)) == [SPARE, SPARE]
    assert attempts.nodes_missing(events(begin, *nodes, *wait, *wait)) == []


def test_a_job_that_was_told_to_end() -> None:
    """is_stopping() considers only the newest attempt."""
    stopped = events((0.0, started()), (1.0, Stopping(reason="stopped by SIGTERM")))
    assert attempts.is_stopping(stopped)
    assert not attempts.is_stopping([*stopped, *events((2.0, started(2)))])


def test_each_incident_step_is_told_once() -> None:
    """One incident returns five steps in order; a generation without an incident returns none."""
    from rekindle.tasks.supervise import incident_steps  # it imports Prefect

    found = IncidentFold()
    steps = [
        step
        for event in RUN
        if (incident := found.add(event)) is not None
        for step in incident_steps(event, incident)
    ]
    assert steps == ["detected", "decided", "regrouped", "restored", "closed"]


@pytest.mark.parametrize("kind", sorted(get_args(AnyEvent), key=lambda kind: kind.__name__))
def test_every_event_has_a_sentence(kind: type[Event]) -> None:
    """Each member of `AnyEvent` has words and a level."""
    event = example_of(kind)
    assert sentence(event)[0].isupper()
    assert level(event) in (logging.DEBUG, logging.INFO, logging.WARNING)


def example_of(kind: type[Any]) -> Any:
    """Return a structure with a value in each text, and in each field without a default."""
    hints = get_type_hints(kind)
    fields = msgspec.structs.fields(kind)
    names = [field.name for field in fields if field.required or hints[field.name] is str]
    return kind(**{name: _value_of(hints[name]) for name in names})


def _value_of(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return example_of(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint))
    return {int: 1, float: 1.0, str: "why"}.get(hint) or (get_origin(hint) or hint)()


def test_sentences_of_nodes_and_final_checkpoints_differ() -> None:
    """A spare, a node, a reason and an error have words of their own."""
    more = events(
        (0.0, NodeJoined(node=SPARE, address="a", pid=7)),
        (0.0, NodeWanted(node=SPARE)),
        (0.0, SpareLost(address="a", pid=7, left=1)),
        (0.0, NodeLeft(node=1, address="a", pid=7)),
        (0.0, NodeLeft(node=SPARE, address="a", pid=7, reason="it cannot read the store")),
        (0.0, NodeLeft(node=1, address="a", pid=7, reason="rank 2 raised")),
        (0.0, FinalCheckpoint(node=0, step=10)),
        (0.0, FinalCheckpoint(node=0, step=10, path="there")),
        (0.0, FinalCheckpoint(node=0, step=10, error="disk full")),
    )
    assert len({sentence(event) for event in more}) == len(more)


@pytest.mark.parametrize(
    ("outcome", "lost"),
    [("stopped", "lost 3 steps"), ("failed", "lost 3 steps"), ("succeeded", "")],
)
def test_the_report_names_the_steps_that_an_end_has_lost(outcome: str, lost: str) -> None:
    """A stop or a failure after the newest checkpoint loses steps, and the report counts them."""
    written = Checkpointed(step=7, path="/c/7", seconds=1.0, bytes=1)
    history = events((0.0, written), (1.0, Ended(outcome=outcome, reason="x", finished=10)))
    text = markdown_report(summarize("train-1", history), resumed="", logs="logs")
    assert ("The end of the job lost" in text, lost in text) == (bool(lost), True)


def test_the_table_row_has_plain_values() -> None:
    """JSON can store a row, and a missing time is empty."""
    row = incident_row(incidents(RUN[:6])[0])
    assert row["total ms"] is None
    assert row["strategy"] == "-"
    assert msgspec.json.decode(msgspec.json.encode(row)) == row


def record(step: int, generation: int, rank: int = 0, loss: float = 1.0) -> StepRecord:
    """Return the record of a step."""
    return StepRecord(
        step=step, generation=generation, rank=rank, at=100.0 + step, metrics={"l": loss}
    )


def test_the_record_of_the_last_generation_counts() -> None:
    """For a repeated step, effective() returns the record of the last generation."""
    found = effective([record(0, 1), record(1, 1), record(2, 1), record(1, 2, loss=2.0)])
    assert {step: r.generation for step, r in found.items()} == {0: 1, 1: 2, 2: 1}


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    """read_records() skips a line that a killed rank did not complete."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    whole = [msgspec.json.encode(record(step, 1)) for step in range(2)]
    (metrics / "rank0.jsonl").write_bytes(whole[0] + b"\n" + whole[1][:20] + b"\n" + whole[1])
    assert [r.step for r in read_records(tmp_path)[0]] == [0, 1]


def test_a_long_file_is_sampled_evenly(tmp_path: Path) -> None:
    """From a long file, sample_records() reads about 4,000 records, evenly spaced."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    count = 120_000
    lines = [msgspec.json.encode(record(step, 1)) for step in range(count)]
    (metrics / "rank0.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (metrics / "rank40.jsonl").write_bytes(lines[0])
    found = sample_records(tmp_path, ranks=32)
    assert set(found) == {0}
    steps = [r.step for r in found[0]]
    assert 3900 < len(steps) < 4100
    assert max(b - a for a, b in itertools.pairwise(steps)) < 60


def test_the_parts_of_an_incident_make_up_its_time() -> None:
    """The parts of an incident add up to the time from the fault to the first good step."""
    [incident] = incidents(RUN)
    parts = parts_of(incident)
    assert list(parts) == ["detect", "decide", "regroup", "restore", "first step"]
    assert abs(sum(parts.values()) - 2100.0) < 1e-6


def test_a_timeline_is_drawn_of_any_job(tmp_path: Path) -> None:
    """draw() makes a picture of a run with incidents, a run without records, and an empty run."""
    records = {rank: [record(step, 1 + step // 10, rank) for step in range(20)] for rank in (0, 1)}
    marks = [timeline.Mark(105.0, "kill -9 rank 1")]
    timeline.draw(RUN, records, tmp_path / "full.png", marks=marks)
    timeline.draw(RUN, {}, tmp_path / "bare.png")
    timeline.draw([], {}, tmp_path / "empty.png")
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def checkpointed(step: int) -> Checkpointed:
    return Checkpointed(step=step, path=f"/store/{step}", bytes=1, seconds=0.1)


def not_written(step: int) -> CheckpointFailed:
    found = Fault(kind=FaultKind.STORAGE, message=f"step {step} failed", finished=step)
    return CheckpointFailed(incident=1, fault=found)


@pytest.mark.parametrize(
    ("news", "failed"),
    [
        ((checkpointed(5),), ""),
        ((checkpointed(5), not_written(10)), "step 10 failed"),
        ((not_written(5), checkpointed(10)), ""),
        ((not_written(10), checkpointed(5)), "step 10 failed"),
        ((not_written(5), started(2), checkpointed(10)), ""),
    ],
)
def test_the_last_checkpoint_of_a_job_was_written_or_failed(
    news: tuple[AnyEvent, ...], failed: str
) -> None:
    """A later checkpoint makes an earlier failure harmless. Only the newest attempt counts."""
    history = events(*[(float(at), each) for at, each in enumerate((started(), *news))])
    found = last_failure(history)
    assert (found.message if found else "") == failed


def test_the_report_names_the_newest_checkpoint() -> None:
    """The caller gives its address."""
    summary = summarize("train-1", RUN)
    text = markdown_report(summary, resumed="", logs="", checkpoint="step 75, at `host:/store/75`")
    assert "Newest checkpoint: step 75, at `host:/store/75`" in text
    assert newest_checkpoint(events((1.0, checkpointed(5)), (2.0, checkpointed(9)))).step == 9
