"""Records without collectives: the diagnosis states its limits instead of a good result."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs.driver import spec_of

from rekindle.cli import main as cli
from rekindle.job.spec import JobDirectory, job_directory
from rekindle.profiling.markers import (
    COMMUNICATION,
    DEFAULT,
    Encoder,
    Operation,
    Range,
    operation_name,
)
from rekindle.profiling.reading import read_task, remarks
from rekindle.recovery.journal import journal

MS = 1_000_000
REDUCED = operation_name(Operation("0", "4", "float32", "all_reduce", "default_group"))
FORWARD = "rank 2 (node 1): the forward pass takes 2."
NOT_KNOWN = "these records do not contain collectives"


def write(
    task: Path, *, steps: int = 80, forward: bool = True, collectives: range = range(0)
) -> Path:
    """Write records of four ranks with equal steps; the forward pass of rank 2 becomes longer.

    collectives: the steps that have records of collectives.
    """
    for rank in range(4):
        (task / str(rank)).mkdir(parents=True)
        encoder, made = Encoder(1, 0), []
        for step in range(steps):
            at = (step + 1) * 100 * MS
            # Real clocks have small deviations.
            took = (80 if rank == 2 and step >= 40 else 30) * MS + (
                step * 7 + rank * 3
            ) % 5 * MS // 10
            if forward:
                made.append(Range("forward", DEFAULT, at, at + took))
            if step in collectives:
                made.append(Range(REDUCED, COMMUNICATION, at + took, at + 90 * MS))
            made.append(Range(f"step {step}", DEFAULT, at, at + 95 * MS))
        data = b"".join(encoder.lines(each, 1) for each in made)
        (task / str(rank) / "100").write_bytes(data)
    return task


def diagnose(*words: str | Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["diagnose", *map(str, words)])
    assert ended.value.code == 0


def test_nobody_is_said_to_be_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without collectives the diagnosis names a longer forward pass, and calls no rank healthy."""
    diagnose(write(tmp_path / "task"), "--per-node", "2")
    shown = capsys.readouterr().out
    assert NOT_KNOWN in shown
    assert "no rank is slow" not in shown
    assert shown.count("the forward pass takes") == 1
    assert FORWARD in shown


def test_programs_are_told_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has no finding, but the number of steps with collectives and the forward pass."""
    diagnose(write(tmp_path / "task"), "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["found"], found["with_collectives"], found["steps"]) == ([], 0, 80)
    assert [each["ranks"] for each in found["slower_forward"]] == [[2]]


def test_without_forward_passes_nothing_more_is_known(tmp_path: Path) -> None:
    """Without collectives and forward passes, the diagnosis calls no rank slow or healthy."""
    (found,) = remarks(read_task(write(tmp_path / "task", forward=False)))
    assert found.startswith(NOT_KNOWN)


def test_forward_passes_that_are_as_they_were(tmp_path: Path) -> None:
    found = remarks(read_task(write(tmp_path / "task", steps=40)))
    assert found[1:] == ["no rank's forward pass has become longer than its peers'"]


def test_collectives_of_some_steps(tmp_path: Path) -> None:
    """If only some steps have collectives, the diagnosis covers only these steps."""
    write(tmp_path / "some", collectives=range(10, 40))
    (found,) = remarks(read_task(tmp_path / "some"))
    assert "only 30 of 80 steps have records of collectives" in found
    write(tmp_path / "all", collectives=range(80))
    assert remarks(read_task(tmp_path / "all")) == []


def test_the_flow_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact of the flow has the same remarks."""
    from rekindle.tasks import profile as profile_report  # it imports Prefect

    job = SimpleNamespace(path=tmp_path, spec=lambda: SimpleNamespace(processes_per_node=2))
    write(tmp_path / "profiling" / "default_task_id_5")
    shown: list[str] = []
    monkeypatch.setattr(profile_report.jobs, "directory_of", lambda _: job)
    monkeypatch.setattr(profile_report, "get_run_logger", lambda: logging.getLogger("flow"))
    monkeypatch.setattr(
        profile_report, "create_markdown_artifact", lambda text, **_: shown.append(text)
    )
    assert profile_report.report_profile.fn("job") == []
    (text,) = shown
    assert f"- {NOT_KNOWN}" in text
    assert f"- {FORWARD}" in text
    assert "No rank is slow" not in text


def hung(task: Path) -> Path:
    """Write records in which rank 2 hangs in step 80 before it writes the collective.

    A kill of all ranks would leave the same records.
    """
    write(task, collectives=range(80))
    _, line = Encoder(1, 0).begin(REDUCED, COMMUNICATION, 82 * 100 * MS, 1)
    for rank in (0, 1, 3):
        with (task / str(rank) / "100").open("ab") as file:
            file.write(line)
    return task


HUNG = "stuck: ranks 0, 1, 3 in all_reduce no. 1 of default_group in step 80, which rank 2 did not"


def test_what_a_killed_rank_had_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed rank may have joined a collective without a record.

    The diagnosis mentions this, unless the rank became silent long before the others.
    """
    task = hung(tmp_path / "task")
    diagnose(task)
    unsure = (
        f"{HUNG} join, according to the records; if these ranks were killed, "
        "their last 5 s are missing"
    )
    assert unsure in capsys.readouterr().out
    monkeypatch.setenv("REKINDLE_PROFILING_FLUSH_S", "0.05")
    diagnose(task)
    assert f"{HUNG} join\n" in capsys.readouterr().out


def test_in_a_job_that_is_over_nobody_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a job that is over, the diagnosis names no stuck rank, because last records are missing.

    The spec of the job has the flush interval.
    """
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path))
    directory = JobDirectory(job_directory("job"))
    spec = spec_of(nodes=4, processes=1, environment={"REKINDLE_PROFILING_FLUSH_S": "0.05"})
    directory.create(spec, logs=False)
    hung(directory.path / "profiling" / "default_task_id_5")
    began = journal.JobStarted(job_id="job", attempt=0, nodes=4, processes_per_node=1, pid=1)
    directory.journal_file.write_bytes(journal.encode(began) + b"\n")
    diagnose("job")
    assert f"{HUNG} join\n" in capsys.readouterr().out
    with directory.journal_file.open("ab") as file:
        over = journal.Ended(outcome="failed", reason="a hang", finished=80)
        file.write(journal.encode(over) + b"\n")
    diagnose("job")
    assert "stuck" not in capsys.readouterr().out
