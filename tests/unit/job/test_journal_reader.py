"""The copy of a journal is complete and in order, also with several writers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.job.journal_reader import JournalCopy
from rekindle.recovery.journal import journal


def event(seq: int) -> journal.NodeWanted:
    return journal.NodeWanted(seq=seq, at=float(seq), node=seq)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "job" / "journal.jsonl"


def numbers(path: Path) -> list[int]:
    return [each.seq for each in JournalCopy(path).events()]


def test_what_comes_next_is_added(path: Path) -> None:
    """add() ignores known events, events without a number, and events after a gap."""
    mirror = JournalCopy(path)
    assert mirror.events() == []
    mirror.add([event(1), event(2)])
    mirror.add([event(2), event(0), event(4)])
    mirror.add([event(1), event(2), event(3), event(4)])
    assert numbers(path) == [1, 2, 3, 4]


def test_several_add(path: Path) -> None:
    one, other = JournalCopy(path), JournalCopy(path)
    one.add([event(1)])
    other.add([event(1), event(2)])
    one.add([event(2), event(3)])
    other.add([event(4)])
    assert numbers(path) == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_writer_that_was_killed_in_a_line(cut: int, path: Path) -> None:
    JournalCopy(path).add([event(1), event(2)])
    path.write_bytes(path.read_bytes()[:-cut])
    left = numbers(path)
    JournalCopy(path).add([event(n) for n in (1, 2, 3)])
    assert numbers(path) == [1, 2, 3]
    assert left in ([1], [1, 2], [])
