"""The lines of a log file for the log of a flow."""

from __future__ import annotations

from pathlib import Path

from rekindle.tasks.output import last_lines, new_lines


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


def test_the_new_lines_of_a_file(tmp_path: Path) -> None:
    """Each line is shown once, when it is complete; of many lines only the last ones are."""
    log = tmp_path / "stdout.log"
    assert new_lines(log, 0) == ("", 0)
    log.write_text("one\ntw")
    text, read = new_lines(log, 0)
    assert text == "one"
    assert new_lines(log, read) == ("", read)
    with log.open("a") as file:
        file.write("o\n")
    text, read = new_lines(log, read)
    assert text == "two"
    with log.open("a") as file:
        file.writelines(f"line {number}\n" for number in range(3_000))
    text, read = new_lines(log, read)
    assert text.startswith(f"(earlier lines are in {log})\nline 2990\n")
    assert text.endswith("line 2999")
    assert read == log.stat().st_size
    log.write_bytes(b"x" * 100_000)  # a line without end
    assert new_lines(log, 0)[1] == 100_000


def test_a_file_that_begins_again(tmp_path: Path) -> None:
    """A file that became shorter is read from where it is."""
    log = tmp_path / "stdout.log"
    log.write_text("new\n")
    assert new_lines(log, 500) == ("", 4)
