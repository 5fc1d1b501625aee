"""Records of other writers, and a trace for other programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rekindle.cli import main as cli
from rekindle.errors import UsageError
from rekindle.profiling.markers import (
    COMMUNICATION,
    DEFAULT,
    Operation,
    Range,
    marks,
    operation_name,
    ranges,
    step_of,
)
from rekindle.profiling.reading import chrome_trace, peers_in, task_in

TASKD = Path(__file__).parent / "taskd.jsonl"


def test_records_that_taskd_has_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`rekindle diagnose` reads TaskD's records in the folder of a task, next to other files."""
    for rank in (0, 1):
        (tmp_path / "task" / str(rank)).mkdir(parents=True)
        shutil.copy(TASKD, tmp_path / "task" / str(rank) / "1753340000")
        (tmp_path / "task" / str(rank) / "notes.txt").write_text("mine")
    (tmp_path / "task" / "parallel_group.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        cli.main(["diagnose", str(tmp_path)])
    assert ended.value.code == 0
    shown = capfd.readouterr().out
    assert "2 ranks, steps" in shown
    assert "no rank is slow" in shown


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ("7", "give FIRST:LAST"),
        ("\u00b2:3", "give FIRST:LAST"),
        ("9000:9001", "there are records of"),
    ],
)
def test_steps_that_are_none(
    asked: str, wrong: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0").mkdir()
    shutil.copy(TASKD, tmp_path / "0" / "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["diagnose", str(tmp_path), "--steps", asked])
    assert ended.value.code == 2
    assert wrong in capfd.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        ["--picture", "nowhere/there/map.png"],
        ["--picture", "map.nothing"],
        ["--trace", "nowhere/there/trace.json"],
        ["--per-node", "0"],
    ],
)
def test_what_cannot_be_done_is_said(
    more: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0").mkdir()
    shutil.copy(TASKD, tmp_path / "0" / "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["diagnose", str(tmp_path), *more])
    assert ended.value.code == 2
    assert more[1] in capfd.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b'{"x":' + b"[" * 200_000,
        b'{"Kind":1,"Flag":2,"SourceKind":0,"Timestamp":1,"Id":1,"Name":"\xff","Domain":"x"}',
    ],
)
def test_a_line_that_somebody_has_spoilt(line: bytes) -> None:
    assert list(marks([line])) == []


WILD = (
    b'{"Kind":1,"Flag":%d,"SourceKind":0,"Timestamp":%s,"Id":%s,'
    b'"MsptiObjectId":{"Pt":{"ProcessId":%s}},"Name":"step 1"}'
)


@pytest.mark.parametrize("wild", [2**63, -(2**70), 10**400])
@pytest.mark.parametrize("field", range(3))
def test_a_number_that_nobody_can_count_with(wild: int, field: int) -> None:
    """marks() skips a time, an Id or a process that is out of range.

    The agent could not send such a number to the coordinator.
    """
    numbers = [b"5", b"6", b"7"]
    assert len(list(marks([WILD % (2, *numbers)]))) == 1
    numbers[field] = b"%d" % wild
    assert list(marks([WILD % (2, *numbers)])) == []


def test_a_range_that_ends_before_it_began() -> None:
    """If the clock was set back within a range, ranges() skips the range."""
    lines = [WILD % (flag, at, b"1", b"1") for flag, at in ((2, b"9"), (4, b"3"))]
    assert list(ranges(lines)) == []


@pytest.mark.parametrize("number", ["\u00b2", "9" * 5000, "-1", ""])
def test_steps_without_a_number(number: str) -> None:
    assert step_of(f"step {number}") == -1


def test_the_newest_task_that_has_records(tmp_path: Path) -> None:
    """task_in() returns the newest task with records, also if its id is a number."""
    for task in ("12345", "12346"):
        (tmp_path / task / "0").mkdir(parents=True)
    shutil.copy(TASKD, tmp_path / "12345" / "0" / "1")
    assert task_in(tmp_path) == tmp_path / "12345"
    for empty in ("12346", "gone"):  # a job that was never profiled has no folder
        with pytest.raises(UsageError, match="does not contain records; switch profiling on"):
            task_in(tmp_path / empty)


def test_a_trace_has_a_process_for_each_rank() -> None:
    name = operation_name(Operation("0", "64", "float32", "all_reduce", "default_group"))
    made = [Range("step 1", DEFAULT, 2_000, 9_000), Range(name, COMMUNICATION, 3_000, 4_000)]
    trace = json.loads(chrome_trace({5: made}, per_node=4))
    named, step, reduced = trace["traceEvents"]
    assert named["args"] == {"name": "rank 5 (node 1)"}
    assert (step["pid"], step["ts"], step["dur"], step["name"]) == (5, 2.0, 7.0, "step 1")
    assert (reduced["name"], reduced["tid"]) == ("all_reduce", 1)
    assert reduced["args"]["groupName"] == "default_group"


def groups(task: Path, rank: int, **named: list[int]) -> None:
    """Write the groups of a rank in TaskD's form."""
    fields = {
        f"hccl-{name}": {"group_name": name, "group_rank": 0, "global_ranks": ranks}
        for name, ranks in named.items()
    }
    (task / str(rank)).mkdir(parents=True, exist_ok=True)
    (task / str(rank) / "parallel_group.json").write_text(json.dumps(fields))


def test_peers_are_those_of_a_data_parallel_group(tmp_path: Path) -> None:
    """Peers are the ranks of a data-parallel group, which do the same work.

    Ranks of other pipeline stages are not peers.
    """
    for rank in range(4):
        stage = rank // 2
        groups(tmp_path, rank, dp=[2 * stage, 2 * stage + 1], pp=[rank % 2, rank % 2 + 2])
    assert peers_in(tmp_path) == [[0, 1], [2, 3]]


def test_without_groups_all_are_peers(tmp_path: Path) -> None:
    groups(tmp_path, 0, tp=[0, 1])
    (tmp_path / "1").mkdir()
    assert peers_in(tmp_path) == []


def test_groups_that_contradict_each_other_are_none(tmp_path: Path) -> None:
    groups(tmp_path, 0, dp=[0, 1])
    groups(tmp_path, 1, dp=[1, 2])
    assert peers_in(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [b"{", b"[" * 200_000, b'{"a":{"group_name":"\xff","global_ranks":[1]}}', b'{"a":[1]}', None],
    ids=["torn", "deep", "no UTF-8", "other", "folder"],
)
def test_groups_that_are_not_understood(text: bytes | None, tmp_path: Path) -> None:
    """The error names the invalid file and the remedy."""
    path = tmp_path / "3" / "parallel_group.json"
    if text is None:
        path.mkdir(parents=True)
    else:
        path.parent.mkdir()
        path.write_bytes(text)
    with pytest.raises(
        UsageError, match=r"3/parallel_group\.json is invalid.* remove or correct it"
    ):
        peers_in(tmp_path)
