"""The last lines of a log file for the log of a flow."""

from __future__ import annotations

from pathlib import Path

from rekindle.tasks.supervise import last_lines


def test_the_last_lines_of_a_file(tmp_path: Path) -> None:
    """The result has five lines at most. A file on another machine has none."""
    log = tmp_path / "stderr.log"
    assert last_lines(log) == ""
    log.write_text("")
    assert last_lines(log) == ""
    log.write_text("".join(f"line {number}\n" for number in range(9)))
    assert last_lines(log) == "line 4\nline 5\nline 6\nline 7\nline 8"
    log.write_bytes(b"\xff" * 1_000_000)
    assert 0 < len(last_lines(log)) <= 4_096
