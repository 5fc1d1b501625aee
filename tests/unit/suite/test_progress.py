"""The order of test files, and the remaining time of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from suite import durations, progress


def test_the_table_lists_slow_files_first() -> None:
    """The table leaves out quick files, and sorts files with equal times by name."""
    seconds = {"b.py": 4.0, "quick.py": durations.LEAST_S / 2, "a.py": 4.0, "slow.py": 61.6}
    assert list(durations.rows(seconds)) == ["62 slow.py", "4 a.py", "4 b.py"]


def test_the_table_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of the table has the seconds and the path."""
    table = tmp_path / "durations.txt"
    table.write_text("\n".join(durations.rows({"slow.py": 61.6, "a.py": 4.0})) + "\n")
    monkeypatch.setattr(durations, "TABLE", table)
    assert durations.read() == {"slow.py": 62.0, "a.py": 4.0}


def test_the_file_of_a_test() -> None:
    """The file of a test is the text before the first `::`."""
    assert durations.file_of("tests/unit/test_a.py::Test::test_b[x::y]") == "tests/unit/test_a.py"


def test_the_expected_time_of_a_test() -> None:
    """The tests of a listed file share its time; all others are quick."""
    tests = Counter({"slow.py": 4, "quick.py": 100})
    found = progress.expected(tests, {"slow.py": 60.0, "gone.py": 5.0})
    assert found == {"slow.py": 15.0, "quick.py": progress.QUICK_S}


@pytest.mark.parametrize(
    ("done", "total", "elapsed", "left"),
    [
        (0.0, 0.0, 5.0, None),  # the run has no tests
        (0.0, 100.0, 5.0, None),
        (0.5, 100.0, 5.0, None),  # too little for an estimate
        (25.0, 100.0, 50.0, 150.0),  # twice as slow as listed
        (100.0, 100.0, 80.0, 0.0),
    ],
)
def test_the_time_left(done: float, total: float, elapsed: float, left: float | None) -> None:
    """The remaining time is the rest of the listed time at the speed of this run."""
    assert progress.left_s(done, total, elapsed) == left
