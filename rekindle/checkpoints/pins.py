"""Pins: a pin protects a checkpoint from all processes that prune the store.

A pin is an empty file (or object) in the folder `pins` next to the checkpoints, so one listing
shows all pins. This module has the pins of a directory:

    pins/<checkpoint>.<name>            until a user or process removes it
    pins/<checkpoint>.<name>@<until>    at most until then, in seconds since the epoch

A reader pins its checkpoint for LEASE_S (`reading` in `store.py`), and renews the pin while it
reads. The pin of a killed reader therefore expires. The clocks of all machines must agree within
LEASE_S / 2.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from rekindle.checkpoints.checkpoint_path import is_unfinished, key_of, name_of
from rekindle.checkpoints.files import locked, make_directories, sync_directory
from rekindle.checkpoints.manifest import MANIFEST_FILE
from rekindle.errors import CheckpointError
from rekindle.states import StateId

PINS: Final = "pins"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MARKER = re.compile(r"(step-[0-9]+-g[0-9]+)\.([A-Za-z0-9_-]{1,100})(?:@([0-9]{1,20}))?")


class Pin(msgspec.Struct, frozen=True):
    """Protects a checkpoint. until: seconds since the epoch; None: until it is removed."""

    key: StateId
    name: str
    until: int | None = None

    @property
    def marker(self) -> str:
        """Return the name of its file or object."""
        end = "" if self.until is None else f"@{self.until}"
        return f"{name_of(*self.key)}.{self.name}{end}"

    def holds(self, now: float) -> bool:
        """Return whether it still protects the checkpoint."""
        return self.until is None or now <= self.until


def pin_of(marker: str) -> Pin | None:
    """Return the pin that has a file or object of this name, or None."""
    match = _MARKER.fullmatch(marker)
    key = key_of(match[1]) if match else None
    if match is None or key is None:
        return None
    return Pin(key, match[2], int(match[3]) if match[3] else None)


def check_name(name: str) -> str:
    """Return the name of a pin. Raises CheckpointError: the name is not valid."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} is not a valid name of a pin; use 1 to 100 of A-Z a-z 0-9 _ -"
        )
    return name


def in_use(pins: Collection[Pin], now: float) -> set[StateId]:
    """Return the checkpoints that are pinned now."""
    return {pin.key for pin in pins if pin.holds(now)}


def expired(pins: Collection[Pin], finished: Collection[StateId], now: float) -> list[Pin]:
    """Return the pins that have expired, and the pins of checkpoints that do not exist."""
    return [pin for pin in pins if not pin.holds(now) or pin.key not in finished]


def listed(root: Path) -> list[Pin]:
    """Return all pins below this root, also expired ones."""
    try:
        names = [path.name for path in (root / PINS).iterdir()]
    except FileNotFoundError:
        return []
    return [pin for name in sorted(names) if (pin := pin_of(name))]


def add(root: Path, path: Path, pin: Pin) -> bool:
    """Pin the checkpoint in `path`. Return False if it does not exist."""
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
    """Remove a pin, if it exists."""
    (root / PINS / pin.marker).unlink(missing_ok=True)


def revoke(root: Path, path: Path, key: StateId, now: float) -> bool:
    """Remove the manifest of a checkpoint. Return False, without a change, if it is pinned.

    The function holds the lock of the pins, so no process can pin the checkpoint in between.
    """
    make_directories(root / PINS)  # for its lock: another process may add the first pin now
    with locked(root / PINS):
        if key in in_use(listed(root), now):
            return False
        # The manifest is removed first: a checkpoint without all its files must not be valid.
        (path / MANIFEST_FILE).unlink(missing_ok=True)
    return True


def sweep(root: Path, finished: Collection[StateId], now: float) -> None:
    """Remove expired pins, and pins of checkpoints that do not exist."""
    for pin in expired(listed(root), finished, now):
        remove(root, pin)
