"""Two threads that read the tables."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from waiting import join, wait_asleep, wait_set

from rekindle.recovery.faults.tables import loading
from rekindle.recovery.faults.tables.loading import Rows, load


def test_two_threads_never_read_the_tables_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second thread waits for the first one: a class is decoded by one thread at first."""
    events: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()
    rows = load(None)

    def read(user_file: Path | None) -> Rows:
        events.append("begin")
        begun.set()
        wait_set(goes_on)
        events.append("end")
        return rows

    monkeypatch.setattr(loading, "_load", read)
    threads = [threading.Thread(target=load, args=(None,)) for _ in range(2)]
    threads[0].start()
    wait_set(begun)
    threads[1].start()
    wait_asleep(threads[1])
    goes_on.set()
    for thread in threads:
        join(thread)
    assert events == ["begin", "end", "begin", "end"]
