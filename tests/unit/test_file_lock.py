"""Only one holder at a time has the lock on a file."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from waiting import bound_s, result_of

from rekindle.errors import LeaseHeldError
from rekindle.file_lock import locked


def test_the_second_holder_waits_for_the_first(tmp_path: Path) -> None:
    """The second holder is notified that it waits, and then reads the text of the first holder."""
    path, waits = tmp_path / "lock", Event()

    def second() -> bytes:
        with locked(path, waits.set) as handle:
            return os.read(handle, 8)

    with ThreadPoolExecutor(1) as pool:
        with locked(path) as handle:
            read = pool.submit(second)
            assert waits.wait(bound_s())
            os.write(handle, b"first")
        assert result_of(read) == b"first"


def test_whoever_does_not_want_to_wait_raises(tmp_path: Path) -> None:
    """An error of the second holder does not release the lock; the end of the first block does."""
    path = tmp_path / "lock"

    def busy() -> None:
        raise LeaseHeldError("taken")

    with locked(path):
        with pytest.raises(LeaseHeldError, match="taken"), locked(path, busy):
            pass
        with pytest.raises(LeaseHeldError, match="taken"), locked(path, busy):
            pass
    with locked(path, busy):
        pass
