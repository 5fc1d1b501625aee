"""The list of jobs, the output of ranks, a report, and an unknown job id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rekindle import names
from rekindle.cli import main as cli
from rekindle.job.spec import JobDirectory
from rekindle.recovery.journal import journal

Run = Callable[..., tuple[int, str, str]]
STARTED = journal.JobStarted(
    seq=1, job_id="job", attempt=0, nodes=1, processes_per_node=2, pid=1, at=1e9
)
ENDED = journal.Ended(seq=2, outcome="failed", reason="a fault", finished=7, at=1e9 + 60)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command, and returns its status and outputs."""
    monkeypatch.setenv(names.ENV_HOME, str(tmp_path))

    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        return (int(ended.value.code or 0), *capfd.readouterr())

    return command


def write(home: Path, job: str, *events: journal.AnyEvent) -> Path:
    """Write the journal of a job; return the job's directory."""
    path = home / "jobs" / job / names.JOURNAL_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in events))
    return path.parent


def with_output(home: Path, monkeypatch: pytest.MonkeyPatch, **text: str) -> Path:
    """Write a job with the output of ranks, given as r0_stdout="...". Return its log folder."""
    directory = write(home, "job", STARTED, ENDED)
    logs = directory / "logs"

    class Spec:
        log_directory = str(logs)

    monkeypatch.setattr(JobDirectory, "spec", lambda _: Spec)
    for name, content in text.items():
        rank, stream = name.removeprefix("r").split("_")
        file = logs / "attempt_0" / rank / f"{stream}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return logs


def test_jobs_are_listed_with_the_newest_first(tmp_path: Path, run: Run) -> None:
    """The list has a job that ended and one that died. A folder without a journal is no job."""
    write(tmp_path, "old", STARTED, ENDED)
    write(tmp_path, "new", msgspec.structs.replace(STARTED, at=2e9))
    (tmp_path / "jobs" / "empty").mkdir()
    status, out, _ = run("jobs", "--json")
    found = json.loads(out)
    assert status == 0
    assert [(each["job_id"], each["state"], each["finished"]) for each in found] == [
        ("new", "died", -1),
        ("old", "failed", 7),
    ]
    assert found[1]["ended"] - found[1]["began"] == 60
    assert [line.split()[:3] for line in run("jobs")[1].splitlines()[1:]] == [
        ["new", "died", "?"],
        ["old", "failed", "7"],
    ]


def test_a_damaged_journal_is_listed(tmp_path: Path, run: Run) -> None:
    """The row names the file; the first line of a job that begins may be incomplete."""
    write(tmp_path, "good", STARTED, ENDED)
    damaged = write(tmp_path, "bad", STARTED, ENDED) / names.JOURNAL_FILE
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    (write(tmp_path, "begins") / names.JOURNAL_FILE).write_bytes(b'{"type": "job-st')
    found = json.loads(run("jobs", "--json")[1])
    assert [(each["job_id"], each["state"]) for each in found] == [
        ("bad", "damaged"),
        ("good", "failed"),
    ]
    assert f"the first line of {damaged} is not an event" in found[0]["reason"]
    assert json.loads(run("jobs", "--json", "--state", "damaged")[1])[0]["job_id"] == "bad"


@pytest.mark.parametrize(
    ("words", "shown"),
    [(("o*",), ["old"]), (("--state", "died"), ["new"]), (("--state", "stopped"), [])],
)
def test_the_list_is_filtered(
    tmp_path: Path, run: Run, words: tuple[str, ...], shown: list[str]
) -> None:
    """A pattern of ids, or a state, selects jobs."""
    write(tmp_path, "old", STARTED, ENDED)
    write(tmp_path, "new", STARTED)
    found = json.loads(run("jobs", "--json", *words)[1])
    assert [each["job_id"] for each in found] == shown


def test_an_unknown_id_suggests_the_nearest(tmp_path: Path, run: Run) -> None:
    """The error names the job with the most similar id, or the command that lists all."""
    write(tmp_path, "nightly-train", STARTED, ENDED)
    for command in ("status", "incidents", "logs", "report"):
        assert "did you mean nightly-train?" in run(command, "nigthly-train")[2]
    assert "rekindle jobs lists them" in run("status", "x")[2]


def test_the_output_of_all_ranks_and_of_one(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of several ranks begins with its rank; that of one rank is as it was written."""
    with_output(tmp_path, monkeypatch, r0_stdout="a\nb\n", r0_stderr="c", r10_stdout="d\n")
    both = "[rank 0] a\n[rank 0] b\n[rank 0] c\n[rank 10] d\n"
    assert run("logs", "job") == (0, both, "")
    assert run("logs", "job", "--rank", "0", "--tail", "1") == (0, "b\nc\n", "")
    assert run("logs", "job", "--rank", "0", "--tail", "0")[1] == ""
    assert run("logs", "job", "--stream", "stderr")[1] == "[rank 0] c\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--rank", "3"), "no output of rank 3, only of 0"),
        (("--restart", "5"), "has no output of ranks"),
        (("--tail", "-1"), "--tail -1: give 0 or more"),
    ],
)
def test_an_output_that_is_not_here_is_an_error(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], error: str
) -> None:
    """The error says what is missing, and which ranks have an output."""
    with_output(tmp_path, monkeypatch, r0_stdout="a\n")
    status, _, err = run("logs", "job", *words)
    assert status != 0
    assert error in err


def test_follow_prints_each_line_once_until_the_job_ends(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is written in two parts is one line, and the next restart is followed."""
    logs = with_output(tmp_path, monkeypatch, r0_stdout="a\nhal")
    write(tmp_path, "job", STARTED)

    def go_on(_: float) -> None:
        """Continue the job while the command waits."""
        with (logs / "attempt_0" / "0" / "stdout.log").open("a") as file:
            file.write("f\n")
        again = logs / "attempt_1" / "0"
        again.mkdir(parents=True)
        (again / "stdout.log").write_text("again")
        write(tmp_path, "job", STARTED, ENDED)

    monkeypatch.setattr("rekindle.cli.job_files.time.sleep", go_on)
    assert run("logs", "job", "--rank", "0", "--follow")[1] == "a\nhalf\nagain\n"


def test_a_report_of_a_job_without_a_flow(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has the outcome, its reason and the place of the logs."""
    logs = with_output(tmp_path, monkeypatch)
    out = run("report", "job")[1]
    assert out.startswith("# Job job failed after 7 steps\n")
    assert "A fault." in out
    assert str(logs) in out
