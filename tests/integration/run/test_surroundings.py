"""Closed or unread streams, unusual output and unusable folders do not disturb a job."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Place, Run
from waiting import run_command

from rekindle.recovery.journal import journal

MUCH = """
import os, sys, time

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for number in range(100 if first else 200_000):
    print(number, "x" * 40)
if first and os.environ["RANK"] == "0":
    sys.exit(3)
if first:
    time.sleep(600)
print("all was printed", file=sys.stderr)
"""

ODD = rb"""
import os, sys, time

os.write(1, b"\xff\xfe\x00 no text\n")
os.write(1, b"x" * 3_000_000 + b"\n")
os.write(1, b"first half, ")
time.sleep(0.3)
os.write(1, b"second half\r\n")
os.write(2, b"\xc3")
os.write(2, b"\xa4 split\n")
os.write(1, b"no end of line")
"""


@pytest.mark.parametrize("streams", ["stdout", "both"])
def test_output_that_is_not_read(place: Place, streams: str) -> None:
    """After `rekindle run | head -1` the ranks complete, and their files have all output.

    Rekindle handles an incident that it cannot show.
    """
    script = place.script(MUCH)
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader:
        both = {"stdout": write} | ({"stderr": write} if streams == "both" else {})
        options = ("--nproc-per-node", "2", "--max-restarts", "1")
        run = place.start_quick(script, *options, **both)
        os.close(write)
        assert reader.readline().startswith(b"[default")
    run.end(0)
    for rank in (0, 1):
        assert run.log(rank, restart=1).endswith("199999 " + "x" * 40 + "\n")
        assert run.log(rank, "stderr", restart=1) == "all was printed\n"


def test_odd_output(place: Place) -> None:
    """Binary bytes, lines of megabytes and lines in pieces are shown and stored completely."""
    (place.folder / "odd.py").write_bytes(ODD)
    run = place.start_quick("odd.py").end(0)
    kept = (run.directory.path / "logs/attempt_0/0/stdout.log").read_bytes()
    assert kept == (
        b"\xff\xfe\x00 no text\n" + b"x" * 3_000_000 + b"\nfirst half, second half\r\n"
        b"no end of line"
    )
    shown = run.out.read_bytes()
    prefix = b"[default0]:"
    assert shown.startswith(prefix + b"\xff\xfe\x00 no text\n" + prefix + b"xxx")
    assert shown.count(b"x") == 3_000_000 + b"no text".count(b"x")
    assert shown.endswith(prefix + b"first half, second half\r\n" + prefix + b"no end of line\n")
    assert run.err.read_bytes() == prefix + "ä split\n".encode()


def test_a_run_without_an_id(place: Place) -> None:
    """`rekindle run` prints the id that it chose; the other commands accept it."""
    command = [sys.executable, "-m", "rekindle.cli.main"]
    run = [*command, "run", "--no-python", "/bin/true"]
    done = run_command(run, env=place.environment(), cwd=place.folder)
    found = re.fullmatch(
        r"\S+Z INFO launcher: job (run-\S+) starts; files are in (.+)\n", done.stderr
    )
    assert found, done.stderr
    assert Path(found[2]).name == found[1]
    shown = run_command([*command, "incidents", found[1]], env=place.environment())
    assert shown.stdout == f"job {found[1]}: no incident\n"


HANGS = """
import sys

for number in range(200_000):
    print(number, "x" * 40)
print("all was printed", file=sys.stderr)
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_log_file_that_takes_no_data(place: Place, status: int) -> None:
    """If the file system hangs in a write, the rank continues and the node is not lost.

    The agent shows all output. It reports the rank's end without the rank's own error.
    """
    logs = place.folder / "logs"
    log = logs / "attempt_0/0/stdout.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)  # without a reader the pipe is full soon
    options = ("--log-dir", str(logs), "--max-restarts", "0")
    run = place.start_quick(place.script(f"{HANGS}\nsys.exit({status})\n"), *options)
    run.end(min(status, 1))
    os.close(reader)
    assert "199999 " + "x" * 40 in run.stdout
    assert "all was printed" in run.stderr
    assert not status or "rank 0 ended with exit status 3" in run.stderr
    assert len(run.incidents()) == bool(status)


# The streams that a shell closes for a launcher.
CLOSED = {"0": "<&-", "01": "<&- >&-", "012": "<&- >&- 2>&-"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run one job id for each row of CLOSED; before the last run its journal gets a torn end."""
    with Place(tmp_path_factory.mktemp("closed") / "place") as place:
        script = place.script("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
        for number, closed in enumerate(CLOSED.values()):
            program = ["sh", "-c", f'exec "$@" {closed}', "sh"]
            options = ("--log-dir", str(place.folder / f"logs{number}"))
            run = place.start_quick(script, *options, program=program).end(0)
            if number == 1:
                tear(run.directory.journal_file)
        yield run


def tear(journal_file: Path) -> None:
    """Cut a journal off in the middle of its last line."""
    journal_file.write_bytes(journal_file.read_bytes()[:-20])


@pytest.mark.parametrize("number", range(len(CLOSED)), ids=CLOSED)
def test_closed_streams(daemon: Run, number: int) -> None:
    """A launcher that started without streams, as a daemon, runs the job."""
    logs = daemon.place.folder / f"logs{number}/attempt_0/0"
    assert (logs / "stdout.log").read_text() == "out\n"
    assert (logs / "stderr.log").read_text() == "err\n"


def test_an_old_journal_with_a_torn_end(daemon: Run) -> None:
    """A job whose journal ends in the middle of a line can run again."""
    assert [event.attempt for event in daemon.events_of(journal.JobStarted)] == [0, 1, 2]
    ends = [event.outcome for event in daemon.events_of(journal.Ended)]
    assert ends == ["succeeded", "succeeded"]


def test_a_home_that_cannot_be_written(place: Place) -> None:
    """The error names the folder that cannot be created, without a traceback or a process."""
    place.home.write_text("a file is in the way")
    run = place.start_quick(place.script("print('was run')"))
    run.end()
    assert run.process.returncode in (1, 2), run.story()
    assert str(place.home) in run.stderr
    assert "Traceback" not in run.stderr
