"""A pod's output as a file: each line once, whatever breaks off and comes again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.engines.kubernetes.watchers.log_stream import PIECE, LogFile


def line(second: int, text: str, fraction: str = "", zone: str = "Z") -> bytes:
    return f"2026-01-02T03:04:{second:02d}{fraction}{zone} {text}\n".encode()


def give(file: LogFile, *lines: bytes) -> None:
    for each in lines:
        for begin in range(0, len(each), PIECE):
            file.add(each[begin : begin + PIECE])


@pytest.fixture
def file(tmp_path: Path) -> LogFile:
    return LogFile(tmp_path / "logs" / "pod.log")


def test_it_goes_on_from_its_last_second(file: LogFile) -> None:
    """What comes again of that is left out; equal lines of one moment are as many as they were."""
    first = [line(1, "a"), line(2, "b", ".5"), line(2, "b", ".5"), line(2, "c", ".7")]
    assert file.resume() == ""
    give(file, *first)
    assert file.resume() == "2026-01-02T03:04:02Z"
    more = [line(2, "b", ".5"), line(2, "c", ".7"), line(3, "d")]
    give(file, *first[1:], *more)
    assert file.path.read_bytes().splitlines(keepends=True) == [*first, *more]


def test_it_goes_on_from_before_its_end(file: LogFile) -> None:
    """What is behind is given up for what comes in its place, and kept if nothing comes."""
    give(file, line(1, "a"), line(2, "b"))
    place = file.size
    later = [line(5, "next"), line(5, "torn")[:-1]]
    give(file, *later)
    assert file.resume(place) == "2026-01-02T03:04:02Z"
    assert file.path.read_bytes() == b"".join([line(1, "a"), line(2, "b"), *later])
    give(file, line(2, "b"), line(3, "c"))
    assert file.path.read_bytes() == line(1, "a") + line(2, "b") + line(3, "c")
    give(file, *later)
    file.resume(0)
    assert file.resume() == "2026-01-02T03:04:05Z"
    give(file, line(6, "d"))
    assert file.path.read_bytes().count(b"\n") == 5


def test_another_process_goes_on(file: LogFile) -> None:
    """It was killed in the middle of a line: that comes again, and is there once."""
    give(file, line(1, "a"), line(1, "b")[:-3])
    file.close()
    again = LogFile(file.path)
    assert again.resume() == "2026-01-02T03:04:01Z"
    give(again, line(1, "a"), line(1, "b"))
    assert file.path.read_bytes() == line(1, "a") + line(1, "b")


@pytest.mark.process
def test_nobody_else_writes_it(file: LogFile) -> None:
    """Not even a process that steers the job on the same machine."""
    script = "import sys; from pathlib import Path\n"
    script += "from rekindle.engines.kubernetes.watchers.log_stream import LogFile\n"
    script += "LogFile(Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(file.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "BlockingIOError" in done.stderr
    file.close()
    assert subprocess.run(command, check=False).returncode == 0


def test_long_lines(file: LogFile) -> None:
    """They are written piece by piece, and known by their beginning."""
    long = line(1, "x" * (3 * PIECE))
    give(file, long)
    assert file.resume()
    give(file, long, line(1, "y"))
    assert file.path.read_bytes() == long + line(1, "y")
    file.add(line(2, "x" * PIECE)[:PIECE])
    file.resume()
    assert file.path.read_bytes() == long + line(1, "y")


def test_a_line_without_an_end(file: LogFile) -> None:
    """The last of a container: it gets one, and is known when it comes again without."""
    give(file, line(1, "a"), line(1, "last")[:-1])
    file.end_line()
    file.resume()
    give(file, line(1, "a"), line(1, "last")[:-1])
    file.end_line()
    assert file.path.read_bytes() == line(1, "a") + line(1, "last")


@pytest.mark.parametrize("zone", ["+08:00", "-03:30", "Z"])
def test_nodes_have_their_own_zones(zone: str, file: LogFile) -> None:
    give(file, line(1, "a", ".123456789", zone))
    assert file.resume() == f"2026-01-02T03:04:01{zone}"


def test_lines_out_of_order(file: LogFile) -> None:
    """Both streams of a container have clocks of their own: what is later stays known."""
    lines = [line(1, "a"), line(2, "b"), line(1, "late")]
    give(file, *lines)
    assert file.resume() == "2026-01-02T03:04:01Z"
    give(file, *lines, line(3, "c"))
    assert file.path.read_bytes() == b"".join([*lines, line(3, "c")])


@pytest.mark.parametrize("content", [b"", b"no time\n", b"\n\n", b"\xff\xfe\n", b"torn"])
def test_what_is_there_is_no_log(content: bytes, tmp_path: Path) -> None:
    """All is wanted from the beginning."""
    path = tmp_path / "pod.log"
    path.write_bytes(content)
    file = LogFile(path)
    assert file.resume() == ""
    give(file, line(1, "a"))
    assert path.read_bytes().endswith(line(1, "a"))


def test_a_tail_that_is_longer_than_what_is_looked_at(file: LogFile) -> None:
    """Memory is bounded: of a second with more than that, its end is known."""
    lines = [line(1, f"{number:06d}" + "x" * 1000) for number in range(6000)]
    give(file, *lines)
    size = file.size
    file.resume()
    give(file, *lines[-1000:])
    assert file.size == size
