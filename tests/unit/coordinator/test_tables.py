"""The coordinator's tables of faults: a thread reads them while the event loop may need them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from waiting import join, wait_asleep, wait_set

from rekindle.coordinator.process import load_tables
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.policy.dialect import Dialect


def test_two_threads_never_read_the_tables_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second thread waits, and gets the tables of the first one."""
    reads: list[Path | None] = []
    begun, goes_on = threading.Event(), threading.Event()
    tables = Tables.load()

    def read(user_file: Path | None, dialect: Dialect) -> Tables:
        reads.append(user_file)
        begun.set()
        wait_set(goes_on)
        return tables

    monkeypatch.setattr(Tables, "load", read)
    found: list[Tables] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(load_tables("the file of this test", Dialect.NONE))
        )
        for _ in range(2)
    ]
    threads[0].start()
    wait_set(begun)
    threads[1].start()
    wait_asleep(threads[1])
    goes_on.set()
    for thread in threads:
        join(thread)
    assert reads == [Path("the file of this test")]
    assert found == [tables, tables]
