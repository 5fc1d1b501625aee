"""The journal survives a full disk and a killed writer."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rekindle import console
from rekindle.errors import JobError
from rekindle.job.journal_file import RESERVED_BYTES, JournalFile
from rekindle.job.journal_reader import events_in, is_over
from rekindle.recovery.journal import journal


def stopping(number: int) -> journal.Event:
    """Return an event of more than 200 bytes."""
    return journal.Stopping(reason=f"{number} " + "x" * 200)


def write(journal_file: JournalFile, event: journal.Event) -> None:
    """Write an event with the next number."""
    journal_file.known.append(msgspec.structs.replace(event, seq=len(journal_file.known) + 1))
    journal_file.write(journal_file.known[-1:])


def numbers(path: Path) -> list[int]:
    """Return the sequence numbers that a reader of the file gets."""
    return [event.seq for event in events_in(path)]


@pytest.fixture
def full_at() -> Iterator[Callable[[int], None]]:
    """Yield a function that limits the size of all files until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_events_of_a_full_disk_are_written_when_there_is_room(
    tmp_path: Path, full_at: Callable[[int], None]
) -> None:
    """The file gets all events in order as soon as it can take them."""
    path = tmp_path / "journal.jsonl"
    journal_file = JournalFile(path)
    for number in range(2):
        write(journal_file, stopping(number))
    full_at(path.stat().st_size + 100)
    for number in range(2, 5):
        write(journal_file, stopping(number))
    assert numbers(path) == [1, 2]
    full_at(resource.RLIM_INFINITY)
    write(journal_file, stopping(5))
    assert numbers(path) == [1, 2, 3, 4, 5, 6]
    journal_file.close()


def test_the_file_has_space_in_advance(tmp_path: Path) -> None:
    """The blocks of the file hold hundreds of further events, also after many events."""
    path = tmp_path / "journal.jsonl"
    journal_file = JournalFile(path)
    for number in range(RESERVED_BYTES // 200):
        status = path.stat()
        assert status.st_blocks * 512 - status.st_size >= RESERVED_BYTES // 2
        write(journal_file, stopping(number))
    journal_file.close()
    assert len(numbers(path)) == RESERVED_BYTES // 200


def test_a_full_disk_is_reported_each_time(tmp_path: Path, full_at: Callable[[int], None]) -> None:
    """A partly written line is a failure too. close() reports the number of lost events."""
    lines: list[str] = []
    console.write_with(lambda fd, line: lines.append(line.decode()))
    path = tmp_path / "journal.jsonl"
    journal_file = JournalFile(path)
    for room in (100, 0):
        full_at(path.stat().st_size + room)
        write(journal_file, stopping(1))
        write(journal_file, stopping(2))
        (line,) = lines
        assert "the coordinator keeps events in memory" in line
        lines.clear()
        full_at(resource.RLIM_INFINITY)
        write(journal_file, stopping(3))
    assert len(numbers(path)) == 6
    full_at(path.stat().st_size + 100)
    write(journal_file, stopping(4))
    journal_file.close()
    assert "journal.jsonl: the coordinator lost events at the end of the attempt: 1" in lines[-1]
    assert len(numbers(path)) == 6


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    """A new writer removes an incomplete last line, and the next event replaces it."""
    path = tmp_path / "journal.jsonl"
    journal_file = JournalFile(path)
    for number in range(3):
        write(journal_file, stopping(number))
    journal_file.close()
    path.write_bytes(path.read_bytes()[:-cut])
    again = JournalFile(path)
    write(again, stopping(3))
    again.close()
    assert numbers(path) == [1, 2, 3]


def test_a_job_that_is_over(tmp_path: Path) -> None:
    """A job is over only if the last line of its journal is the end of its newest attempt."""
    path = tmp_path / "journal.jsonl"
    assert not is_over(path)
    journal_file = JournalFile(path)
    assert not is_over(path)
    write(journal_file, stopping(1))
    assert not is_over(path)
    write(journal_file, journal.Ended(outcome="failed", reason="x" * 100_000, finished=3))
    assert is_over(path)
    with path.open("ab") as torn:
        torn.write(b'{"type":"job-sta')
    assert not is_over(path)
    write(journal_file, stopping(2))
    assert not is_over(path)


def test_a_second_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two coordinators never write one journal, even if the first one does not end in time."""
    monkeypatch.setattr("rekindle.job.journal_file.LOCK_S", 0.05)
    path = tmp_path / "journal.jsonl"
    first = JournalFile(path)
    write(first, stopping(0))
    written = path.read_bytes()
    with pytest.raises(JobError, match="another coordinator of this job writes"):
        JournalFile(path)
    assert path.read_bytes() == written
    first.close()
    second = JournalFile(path)
    assert [event.seq for event in second.known] == [1]
    second.close()
