"""The event log: an event counts as recorded when it is written, or when the file system hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from waiting import bound_s, finished, turn_until, turns

from rekindle.coordinator import event_log as module
from rekindle.coordinator.event_log import EventLog
from rekindle.job.journal_file import JournalFile
from rekindle.job.journal_reader import events_in
from rekindle.recovery.journal import journal


class SlowFile(JournalFile):
    """A journal whose writes wait until `answers` is set, as those of a file system that hangs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.answers = threading.Event()

    def write(self, events: Iterable[journal.Event]) -> None:
        self.answers.wait(bound_s())
        super().write(events)


def stopping(number: int) -> journal.Event:
    return journal.Stopping(reason=str(number))


def test_an_event_is_recorded_when_it_is_written(tmp_path: Path) -> None:
    """Followers, readers and orders wait for the write of an event, and the event loop does not."""

    async def run() -> None:
        path = tmp_path / "journal"
        file = SlowFile(path)
        told: list[int] = []
        log = EventLog(file, lambda: told.append(log.recorded))
        follower = log.follow(0, 3600.0)
        following = asyncio.ensure_future(anext(follower))
        await turns()
        log.append(stopping(1))
        log.append(stopping(2))
        settled = asyncio.create_task(log.settle())
        await turns()
        assert (log.recorded, told, following.done(), settled.done()) == (0, [], False, False)
        file.answers.set()
        await finished(settled)
        assert [event.seq for event in events_in(path)] == [1, 2]
        assert journal.decode(await finished(following)).seq == 1
        assert told[-1] == log.recorded == 2
        await follower.aclose()
        await log.close()

    asyncio.run(run())


def test_a_file_system_that_hangs_does_not_stop_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the limit events count as recorded in memory. The file gets all of them later."""
    monkeypatch.setattr(module, "HANGS_S", 0.05)

    async def run() -> None:
        path = tmp_path / "journal"
        file = SlowFile(path)
        log = EventLog(file, lambda: None)
        log.append(stopping(1))
        await turn_until(lambda: log.recorded == 1, "the limit")
        log.append(stopping(2))
        assert log.recorded == 2
        assert events_in(path) == []
        file.answers.set()
        await turn_until(lambda: len(events_in(path)) == 2, "both events in the file")
        monkeypatch.setattr(module, "HANGS_S", bound_s())
        await log.close()

    asyncio.run(run())
    said = capfd.readouterr().err
    assert said.count("the file system has not answered for 0.05 s") == 1
    assert said.count("the file system answers again") == 1


def test_the_end_does_not_wait_for_a_file_system_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The coordinator ends, and a text has the number of the lost events."""
    monkeypatch.setattr(module, "HANGS_S", 0.05)

    async def run() -> SlowFile:
        file = SlowFile(tmp_path / "journal")
        log = EventLog(file, lambda: None)
        log.append(stopping(1))
        await finished(log.close())
        return file

    file = asyncio.run(run())
    file.answers.set()
    assert "the coordinator ends, and loses events: 1" in capfd.readouterr().err
