"""The directory store: a loss of power leaves each committed checkpoint."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from stores import newest_step, put, put_parts

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.pins import Pin


class Disk:
    """Records the names and bytes that fsync has written to the disk.

    It simulates the worst case: a loss of power leaves nothing else. A file or a directory without
    fsync is then empty. The tests remove nothing, so that no later file has the inode number of an
    earlier one.
    """

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._top = top
        self._kept: dict[int, bytes | dict[str, int]] = {}  # by inode number
        self.at_sync: Callable[[], object] = lambda: None
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._on_fsync)

    def _on_fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        status, path = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(descriptor) as entries:
                self._kept[status.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            self._kept[status.st_ino] = path.read_bytes()
        self.at_sync()

    def lose_power(self, target: Path) -> None:
        """Create the tree that a loss of power would leave now."""
        self._leave(self._top, self._top.stat().st_ino, target)

    def _leave(self, there: Path, number: int, target: Path) -> None:
        kept = self._kept.get(number)
        if not there.is_dir():
            target.write_bytes(kept if isinstance(kept, bytes) else b"")
            return
        target.mkdir()
        for name, inner in (kept if isinstance(kept, dict) else {}).items():
            self._leave(there / name, inner, target / name)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    (tmp_path / "disk").mkdir()
    return Disk(tmp_path / "disk", monkeypatch)


@pytest.mark.parametrize("write", [put, put_parts], ids=["one writer", "parts"])
def test_a_loss_of_power_leaves_what_was_committed(
    write: Callable[[DirectoryStore, int], object], disk: Disk, tmp_path: Path
) -> None:
    """A loss of power after a write leaves its checkpoint.

    During the next write it leaves that checkpoint or the next one.
    """
    place = Path("jobs", "checkpoints")
    store = DirectoryStore(tmp_path / "disk" / place)
    losses, committed = 0, None

    def newest() -> int | None:
        nonlocal losses
        losses += 1
        disk.lose_power(tmp_path / f"left-{losses}")
        return newest_step(DirectoryStore(tmp_path / f"left-{losses}" / place))

    for step in (1, 2):
        seen: set[int | None] = set()
        disk.at_sync = lambda seen=seen: seen.add(newest())
        write(store, step)
        disk.at_sync = lambda: None
        assert seen == {committed, step}
        assert newest() == step
        committed = step
    assert losses > 10


def test_a_loss_of_power_leaves_pins(disk: Disk, tmp_path: Path) -> None:
    """A pin exists after a loss of power if `pin` had returned before."""
    store, pin = DirectoryStore(tmp_path / "disk" / "checkpoints"), Pin((1, 1), "release")
    put(store, 1)
    assert store.pin(pin)
    disk.lose_power(tmp_path / "left")
    assert DirectoryStore(tmp_path / "left" / "checkpoints").pins() == [pin]
