"""Pins as files of a directory store: its `pins` directory, and the lock that goes with it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rekindle.checkpoints.checkpoint_path import Key, is_unfinished
from rekindle.checkpoints.files import locked, make_directories, sync_directory
from rekindle.checkpoints.manifest import MANIFEST_FILE
from rekindle.checkpoints.pins import PINS, Pin, expired, in_use, pin_of


def listed(root: Path) -> list[Pin]:
    """All pins below this root, also those that have expired."""
    try:
        names = [path.name for path in (root / PINS).iterdir()]
    except FileNotFoundError:
        return []
    return [pin for name in sorted(names) if (pin := pin_of(name))]


def add(root: Path, path: Path, pin: Pin) -> bool:
    """Pin the checkpoint in `path`; False: it is not there."""
    if is_unfinished(path):
        return False
    make_directories(root / PINS)
    with locked(root / PINS):
        if is_unfinished(path):
            return False
        (root / PINS / pin.marker).touch()
        sync_directory(root / PINS)
    return True


def remove(root: Path, pin: Pin) -> None:
    """Remove a pin, if it is there."""
    (root / PINS / pin.marker).unlink(missing_ok=True)


def revoke(root: Path, path: Path, key: Key, now: float) -> bool:
    """Make a checkpoint count no more, unless it is pinned; nobody can pin it meanwhile."""
    make_directories(root / PINS)  # for its lock: the first pin of all may come just now
    with locked(root / PINS):
        if key in in_use(listed(root), now):
            return False
        # The manifest first: a checkpoint that is half removed must not count.
        (path / MANIFEST_FILE).unlink(missing_ok=True)
    return True


def sweep(root: Path, finished: Collection[Key], now: float) -> None:
    """Remove the pins that nobody needs."""
    for pin in expired(listed(root), finished, now):
        remove(root, pin)
