"""The output of a pod in a file: no line is missing, and few occur twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from rekindle.engines.kubernetes.watchers.log_stream import PIECE, TAIL, LogFile

END = datetime.fromisoformat("2026-01-02T03:04:04+00:00")  # the end of a run


def line(second: int, text: str, fraction: str = "", zone: str = "Z") -> bytes:
    return f"2026-01-02T03:04:{second:02d}{fraction}{zone} {text}\n".encode()


def give(file: LogFile, *lines: bytes) -> None:
    for each in lines:
        for begin in range(0, len(each), PIECE):
            file.add(each[begin : begin + PIECE])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "pod.log"


@pytest.fixture
def file(path: Path) -> Iterator[LogFile]:
    found = LogFile(path)
    yield found
    found.close()


def test_it_goes_on_from_its_last_line(file: LogFile, path: Path) -> None:
    """The file requests lines from a second before its last line, and skips known lines."""
    first = [line(1, "a"), line(2, "b", ".5"), line(2, "c", ".7")]
    assert file.resume() == ""
    give(file, *first)
    assert file.resume() == "2026-01-02T03:04:01+00:00"
    more = [line(2, "d", ".71"), line(3, "e")]
    give(file, *first, *more)
    assert path.read_bytes().splitlines(keepends=True) == [*first, *more]


def test_it_goes_on_from_before_its_end(file: LogFile, path: Path) -> None:
    """If the file has lines of the next run, the rest of the previous run follows them."""
    there = [line(1, "a"), line(2, "b"), line(5, "next")]
    give(file, *there)
    assert file.resume(END) == "2026-01-02T03:04:01+00:00"
    give(file, line(1, "a"), line(2, "b"), line(3, "c"))
    assert file.resume() == "2026-01-02T03:04:02+00:00"
    more = [line(3, "c"), line(6, "d")]
    give(file, line(2, "b"), line(3, "c"), line(5, "next"), line(6, "d"))
    assert path.read_bytes().splitlines(keepends=True) == [*there, *more]


def test_it_has_nothing_from_before(file: LogFile, path: Path) -> None:
    """If no line is older than the end of the run, the file requests all lines.

    It skips known lines.
    """
    there = [line(4, "of either run"), line(5, "next")]
    give(file, *there)
    assert file.resume(END) == ""
    give(file, line(1, "a"), there[0])
    assert path.read_bytes() == b"".join([*there, line(1, "a")])


def test_another_process_goes_on(path: Path) -> None:
    """If a killed process left an incomplete line, the next process writes the complete line."""
    first = LogFile(path)
    give(first, line(1, "a"), line(1, "b")[:-3])
    first.close()
    again = LogFile(path)
    assert again.resume() == "2026-01-02T03:04:00+00:00"
    give(again, line(1, "a"), line(1, "b"), line(2, "c"))
    again.close()
    broken = line(1, "b")[:-3] + b"\n"
    assert path.read_bytes() == line(1, "a") + broken + line(1, "b") + line(2, "c")


@pytest.mark.process
def test_nobody_else_writes_it(file: LogFile, path: Path) -> None:
    """Another process on the same machine cannot write the file."""
    script = "import sys; from pathlib import Path\n"
    script += "from rekindle.engines.kubernetes.watchers.log_stream import LogFile\n"
    script += "LogFile(Path(sys.argv[1])).close()"
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "BlockingIOError" in done.stderr


def test_it_is_free_once_it_is_closed(path: Path) -> None:
    """After close(), another process may write the file."""
    LogFile(path).close()
    LogFile(path).close()


def test_long_lines(file: LogFile, path: Path) -> None:
    """The file writes a long line in pieces, and recognizes it by its start."""
    long = line(1, "x" * (3 * PIECE))
    give(file, long)
    assert file.resume()
    give(file, long, line(1, "y"))
    assert path.read_bytes() == long + line(1, "y")


def test_a_line_longer_than_the_end_that_is_read(file: LogFile, path: Path) -> None:
    """If the last line is longer than TAIL, LogFile does not find its time.

    It then requests all lines.
    """
    long = line(1, "x" * (TAIL + PIECE))[:-1]
    give(file, long)
    assert file.resume() == ""
    give(file, line(2, "y"))
    assert path.read_bytes() == long + b"\n" + line(2, "y")


def test_a_line_that_broke_off(file: LogFile, path: Path) -> None:
    """The file ends an incomplete line, and then writes the complete line."""
    give(file, line(1, "a"), line(2, "broke off")[:-4])
    assert file.resume() == "2026-01-02T03:04:01+00:00"
    give(file, line(1, "a"), line(2, "broke off"))
    assert path.read_bytes().endswith(line(2, "broke off")[:-4] + b"\n" + line(2, "broke off"))


def test_a_line_without_an_end(file: LogFile, path: Path) -> None:
    """The file recognizes the last line of a container, which has no line end."""
    give(file, line(1, "a"), line(2, "last")[:-1])
    for _ in range(2):
        file.resume()
        give(file, line(1, "a"), line(2, "last")[:-1])
    assert path.read_bytes() == line(1, "a") + line(2, "last")


@pytest.mark.parametrize("zone", ["+08:00", "-03:30", "+00:00"])
def test_nodes_have_their_own_zones(zone: str, file: LogFile) -> None:
    give(file, line(2, "a", ".123456789", zone))
    assert file.resume() == f"2026-01-02T03:04:01{zone}"


def test_a_node_changes_its_zone(file: LogFile, path: Path) -> None:
    """The file compares times, not their text."""
    first = b"2026-10-25T02:59:59.5+02:00 a\n"
    give(file, first)
    file.resume()
    give(file, first, b"2026-10-25T02:00:01.5+01:00 b\n")
    assert path.read_bytes().count(b"\n") == 2


def test_lines_out_of_order(file: LogFile, path: Path) -> None:
    """The streams of a container may be out of order, and a late line occurs once."""
    first = [line(1, "a", ".9"), line(2, "b", ".0002")]
    late = line(1, "late", ".9999")
    give(file, *first)
    assert file.resume() == "2026-01-02T03:04:01+00:00"
    give(file, *first, late)
    file.resume()
    give(file, *first, late)
    assert path.read_bytes() == b"".join([*first, late])


def test_lines_of_one_moment(file: LogFile, path: Path) -> None:
    """Equal lines with equal times all stay, because some nodes use one time for several lines."""
    dots = [line(1, ".", ".5")] * 3
    for number in (1, 2, 3):
        file.resume()
        give(file, *dots[:number])
    assert path.read_bytes() == b"".join(dots)


def test_the_clock_is_set_back(file: LogFile, path: Path) -> None:
    """The last line of the file decides the request, not the latest time."""
    give(file, line(9, "a"), line(3, "b"))
    assert file.resume() == "2026-01-02T03:04:02+00:00"
    give(file, line(9, "a"), line(3, "b"), line(4, "c"))
    assert path.read_bytes() == line(9, "a") + line(3, "b") + line(4, "c")


def test_a_message_without_a_time(file: LogFile, path: Path) -> None:
    """A message without a time, from a node without output, occurs once."""
    for _ in range(3):
        file.resume()
        give(file, b"unable to retrieve the logs\n")
    assert path.read_bytes() == b"unable to retrieve the logs\n"


def test_the_last_line_is_gone_from_the_server(file: LogFile, path: Path) -> None:
    """If the server has removed the last known line, the file takes all newer lines."""
    give(file, line(1, "a"))
    file.resume()
    give(file, line(4, "d"))
    assert path.read_bytes() == line(1, "a") + line(4, "d")


@pytest.mark.parametrize("content", [b"", b"no time\n", b"\n\n", b"\xff\xfe\n", b"torn"])
def test_what_is_there_is_no_log(content: bytes, path: Path) -> None:
    """If the existing file is not a log, LogFile requests all lines."""
    path.parent.mkdir()
    path.write_bytes(content)
    file = LogFile(path)
    assert file.resume() == ""
    give(file, line(1, "a"))
    file.close()
    assert path.read_bytes().endswith(line(1, "a"))
    assert path.read_bytes().startswith(content)


def test_more_lines_in_a_second_than_the_end_that_is_read(path: Path) -> None:
    """With bounded memory, the file recognizes lines before the last one by their times."""
    lines = [line(1, "x" * 1000, f".{number:06d}") for number in range(2 * TAIL // 1000)]
    first = LogFile(path)
    give(first, *lines)
    first.close()
    again = LogFile(path)
    again.resume()
    give(again, *lines)
    assert again.size == sum(map(len, lines))
    again.close()
