"""Files of records: the writer appends to the newest, limits sizes, and removes old ones.

It does not touch other files.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rekindle.console import say
from rekindle.profiling import files
from rekindle.profiling.files import RecordFiles, age, lines_of, numbered, rank_folders, task_folder
from rekindle.profiling.switch import RecordLimits, limits_in


def test_folders_are_named_after_the_task(tmp_path: Path) -> None:
    assert task_folder(tmp_path, "task-7", 5.5) == tmp_path / "task-7"
    assert task_folder(tmp_path, "", 1234.9) == tmp_path / "default_task_id_1234"


def test_records_go_to_the_newest_file(tmp_path: Path) -> None:
    for name, content in (("100", "old\n"), ("200", "new\n"), ("notes.txt", "mine\n")):
        (tmp_path / name).write_text(content)
    records = RecordFiles(tmp_path)
    records.append(b"more\n")
    records.close()
    assert (tmp_path / "200").read_bytes() == b"new\nmore\n"
    assert (tmp_path / "100").read_bytes() == b"old\n"
    assert list(lines_of(tmp_path)) == [b"old\n", b"new\n", b"more\n"]


def test_a_file_that_is_too_large_is_followed_by_another(tmp_path: Path) -> None:
    records = RecordFiles(tmp_path / "0", 1000)
    for number in range(5):
        records.append(b"%d" % number * 600 + b"\n")
    records.close()
    found = sorted(numbered(tmp_path / "0"), key=lambda path: int(path.name))
    assert [path.stat().st_size for path in found] == [1202, 1202, 601]
    assert len({path.name for path in found}) == 3  # different names within one second
    again = RecordFiles(tmp_path / "0", 1000)
    again.append(b"x\n")
    again.close()
    assert found[-1].read_bytes().endswith(b"\nx\n")


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    """After the kill of a rank during a write, its successor continues in the file.

    Only the incomplete line is lost.
    """
    (tmp_path / "7").write_bytes(b'{"Kind":1}\n{"Ki')
    files = RecordFiles(tmp_path)
    files.append(b'{"Kind":2}\n')
    files.append(b'{"Kind":3}\n')
    files.close()
    assert list(lines_of(tmp_path)) == [
        b'{"Kind":1}\n',
        b'{"Ki\n',
        b'{"Kind":2}\n',
        b'{"Kind":3}\n',
    ]


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_somebody_has_cleared_is_made_again(tmp_path: Path, again: bool) -> None:
    """If a user moves the folder, the writer creates it again, and loses no later record.

    The folder may exist again already.
    """
    records = RecordFiles(tmp_path / "0")
    records.append(b"old\n")
    (tmp_path / "0").rename(tmp_path / "away")
    if again:
        (tmp_path / "0").mkdir()
    records.append(b"new\n")
    records.append(b"more\n")
    records.close()
    assert list(lines_of(tmp_path / "0")) == [b"new\n", b"more\n"]


def test_it_ends_at_ten_mebibytes() -> None:
    """Without settings, the limits are those of TaskD."""
    taskd = RecordLimits(cap_bytes=5000 * 2**20, file_bytes=10 * 2**20, flush_s=5.0)
    assert limits_in({}, say) == taskd


def test_the_environment_says_other_figures(capfd: pytest.CaptureFixture[str]) -> None:
    """The environment sets other limits; the command reports a wrong value and ignores it."""
    fields = {
        "REKINDLE_PROFILING_CAP_MB": "200",
        "REKINDLE_PROFILING_FILE_MB": "0.5",
        "REKINDLE_PROFILING_FLUSH_S": "20",
    }
    assert limits_in(fields, say) == RecordLimits(
        cap_bytes=200 * 2**20, file_bytes=2**19, flush_s=20.0
    )
    for wrong in ("0", "-1", "nan", "inf", "1e40", "much"):
        assert limits_in(dict.fromkeys(fields, wrong), say) == RecordLimits()
        assert capfd.readouterr().err.count(f"is {wrong!r}, which is not a number above 0") == 3


def fill(folder: Path, rank: int, count: int) -> list[Path]:
    place = folder / "task" / str(rank)
    place.mkdir(parents=True)
    made = []
    for number in range(count):
        path = place / str(1000 + number)
        path.write_bytes(b"x" * 100)
        # The age follows from the modification time, not from the name.
        os.utime(path, (5000 - number, 5000 - number))
        made.append(path)
    return made


def test_the_oldest_fifth_ages(tmp_path: Path) -> None:
    mine = fill(tmp_path, 0, 10)
    others = fill(tmp_path, 1, 10)
    notes = tmp_path / "task" / "0" / "notes"
    notes.write_text("x" * 5000)
    assert age(tmp_path, [0], cap_bytes=2000) == []
    removed = age(tmp_path, [0], cap_bytes=1999)
    assert removed == [mine[9], mine[8]]
    assert all(path.exists() for path in (*others, *mine[:8], notes))


@pytest.mark.parametrize(("count", "gone"), [(1, 0), (3, 0), (4, 0), (5, 1), (9, 1), (25, 5)])
def test_few_files_do_not_age(tmp_path: Path, count: int, gone: int) -> None:
    fill(tmp_path, 0, count)
    assert len(age(tmp_path, [0], cap_bytes=0)) == gone


def test_only_files_with_numbers_of_ranks_are_ours(tmp_path: Path) -> None:
    fill(tmp_path, 0, 5)
    elsewhere = tmp_path / "task" / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "1").write_text("x" * 9999)
    (tmp_path / "task" / "0" / "9").symlink_to(elsewhere / "1")
    (tmp_path / "task" / "parallel_group.json").write_text("{}")
    assert set(rank_folders(tmp_path / "task")) == {0}
    assert len(age(tmp_path, [0, 1, 2], cap_bytes=0)) == 1
    assert (elsewhere / "1").exists()


def test_nothing_is_there_yet(tmp_path: Path) -> None:
    assert list(lines_of(tmp_path / "none")) == []
    assert age(tmp_path / "none", [0]) == []


def test_a_local_disk_is_no_network(tmp_path: Path) -> None:
    assert not files.is_network(Path("/proc"))


def test_nothing_is_followed_out_of_the_folder(tmp_path: Path) -> None:
    """The writer and the removal do not follow symbolic links."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for number in range(10):
        (elsewhere / str(number)).write_bytes(b"x" * 100)
    task = tmp_path / "records" / "task"
    task.mkdir(parents=True)
    (task / "0").symlink_to(elsewhere)
    assert age(tmp_path / "records", (0,), cap_bytes=10) == []
    assert rank_folders(task) == {}
    rank = task / "1"
    rank.mkdir()
    for number in range(int(time.time()), int(time.time()) + 60):
        (rank / str(number)).symlink_to(elsewhere / "0")
    with pytest.raises(OSError, match="symbolic links"):
        RecordFiles(rank).append(b"mine\n")
    assert (elsewhere / "0").read_bytes() == b"x" * 100
