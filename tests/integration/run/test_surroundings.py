"""Odd terminals, odd output and odd folders change nothing about a job."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from jobs import Place, Run
from waiting import bound_s

from rekindle.recovery import journal

MUCH = """
import sys

for number in range(200_000):
    print(number, "x" * 40)
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

WORLD = """
import os, sys

import torch.distributed as dist

dist.init_process_group("gloo")
print("sum", sum(range(dist.get_world_size())), sys.argv[1:], os.getcwd())
dist.barrier()
"""


@pytest.mark.parametrize("streams", ["stdout", "both"])
def test_nobody_reads_the_output(place: Place, streams: str) -> None:
    """`rekindle run | head -1`: ranks go on to their end, and their files have all of it."""
    script = place.script(MUCH)
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader:
        both = {"stdout": write} | ({"stderr": write} if streams == "both" else {})
        run = place.start_quick(script, "--nproc-per-node", "2", **both)
        os.close(write)
        assert reader.readline().startswith(b"[default")
    run.end(0)
    for rank in (0, 1):
        assert run.log(rank).endswith("199999 " + "x" * 40 + "\n")
        assert run.log(rank, "stderr") == "all was printed\n"


def test_nobody_reads_what_the_launcher_says(place: Place) -> None:
    """An incident that cannot be shown is dealt with all the same."""
    script = place.script(
        "import os, sys, time\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    sys.exit(3)\n"
        "print('again')\n"
    )
    read, write = os.pipe()
    os.close(read)
    run = place.start_quick(script, "--max-restarts", "1", stdout=write, stderr=write)
    os.close(write)
    run.end(0)
    assert run.log(0, restart=1) == "again\n"


def test_odd_output(place: Place) -> None:
    """Bytes that are no text, lines of megabytes and lines in pieces are shown and kept whole."""
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


def test_a_folder_with_spaces_and_umlauts(place: Place) -> None:
    """Home, working folder, script and arguments may be spelt as people spell them."""
    odd = place.folder / "mein Übungs 'Ordner' $HOME"
    odd.mkdir()
    within = Place(odd / "place")
    script = within.script(WORLD, "mein träining.py")
    run = within.start("--nproc-per-node", "2", script, "ein Wört", cwd=within.folder).end(0)
    line = f"sum 1 ['ein Wört'] {within.folder}"
    assert sorted(run.stdout.splitlines()) == [f"[default0]:{line}", f"[default1]:{line}"]
    within.close()


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"], ids=["0", "01", "012"])
def test_closed_streams(place: Place, closed: str) -> None:
    """A launcher that was started without streams (a daemon's) runs the job like any other."""
    script = place.script("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    command = [sys.executable, "-m", "rekindle.cli", "run", "--job-id", "job", "--no-python"]
    shell = f'exec "$@" {closed}'
    ended = subprocess.run(
        ["sh", "-c", shell, "sh", *command, sys.executable, script],
        cwd=place.folder,
        env=place.environment(),
        capture_output=True,
        timeout=bound_s(),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    place.wait_for_silence()
    logs = place.home / "jobs/job/logs/attempt_0/0"
    assert (logs / "stdout.log").read_text() == "out\n"
    assert (logs / "stderr.log").read_text() == "err\n"


def test_a_home_that_cannot_be_written(place: Place) -> None:
    """The folder that cannot be made is named; no traceback, no process."""
    place.home.write_text("a file is in the way")
    run = place.start_quick(place.script("print('was run')"))
    run.end()
    assert run.process.returncode in (1, 2), run.said()
    assert str(place.home) in run.stderr
    assert "Traceback" not in run.stderr


def test_an_old_ledger_with_a_torn_end(place: Place) -> None:
    """A job whose coordinator was cut off in the middle of a line can be run again."""
    script = place.script("print('runs')")
    run = place.start_quick(script).end(0)
    content = run.directory.ledger.read_bytes()
    run.directory.ledger.write_bytes(content[:-20])
    again: Run = place.start_quick(script).end(0)
    assert [event.attempt for event in again.recorded(journal.JobStarted)] == [0, 1]
    assert [event.outcome for event in again.recorded(journal.Ended)] == ["succeeded"]
