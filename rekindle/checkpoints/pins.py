"""Pins: a pinned checkpoint stays, for all who share its store; as files of a directory.

A pin is an empty file (or object) in the place `pins` beside the checkpoints, so that one listing
tells them all:

    pins/<checkpoint>.<name>            until somebody removes it
    pins/<checkpoint>.<name>@<until>    at most until then, in seconds since the epoch

Whoever reads a checkpoint pins it for a while and renews that as long as it reads. So a reader that
was killed keeps nothing for ever. The clocks of all machines have to agree within LEASE_S / 2.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from rekindle.checkpoints.checkpoint_path import Key, is_unfinished, key_of, name_of
from rekindle.checkpoints.files import locked, make_directories, sync_directory
from rekindle.checkpoints.manifest import MANIFEST_FILE
from rekindle.errors import CheckpointError

if TYPE_CHECKING:
    from rekindle.checkpoints.store import CheckpointStore

PINS: Final = "pins"
LEASE_S: Final = 600.0  # for which a reader pins; it renews that three times as often
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MARKER = re.compile(r"(step-[0-9]+-g[0-9]+)\.([A-Za-z0-9_-]{1,100})(?:@([0-9]{1,20}))?")


class Pin(msgspec.Struct, frozen=True):
    """Keeps a checkpoint. until: seconds since the epoch; None: until it is removed."""

    key: Key
    name: str
    until: int | None = None

    @property
    def marker(self) -> str:
        """The name of its file or object."""
        end = "" if self.until is None else f"@{self.until}"
        return f"{name_of(*self.key)}.{self.name}{end}"

    def holds(self, now: float) -> bool:
        """Whether it still keeps the checkpoint."""
        return self.until is None or now <= self.until


def pin_of(marker: str) -> Pin | None:
    """The pin that a file or object of this name is; None: it is none."""
    match = _MARKER.fullmatch(marker)
    key = key_of(match[1]) if match else None
    if match is None or key is None:
        return None
    return Pin(key, match[2], int(match[3]) if match[3] else None)


def check_name(name: str) -> str:
    """The name of a pin, if it can be one. Raises CheckpointError."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{name!r} is no name of a pin: use 1 to 100 of A-Z a-z 0-9 _ -")
    return name


def in_use(pins: Collection[Pin], now: float) -> set[Key]:
    """The checkpoints that are pinned."""
    return {pin.key for pin in pins if pin.holds(now)}


def expired(pins: Collection[Pin], finished: Collection[Key], now: float) -> list[Pin]:
    """The pins that nobody needs: of dead readers, and of checkpoints that are gone."""
    return [pin for pin in pins if not pin.holds(now) or pin.key not in finished]


@contextlib.contextmanager
def reading(store: CheckpointStore, key: Key, *, lease_s: float = LEASE_S) -> Iterator[None]:
    """Keep a checkpoint from being pruned while it is read here.

    Whoever may not write to the store reads all the same, and sees if the checkpoint goes.
    Raises CheckpointError: it is not there (any more).
    """
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60]
    name = f"read-{host}-{os.getpid()}-{secrets.token_hex(4)}"
    over = threading.Event()
    pins = [Pin(key, name, _end(lease_s))]

    def renew() -> None:
        while not over.wait(lease_s / 3):
            longer = Pin(key, name, _end(lease_s))
            if longer == pins[-1]:
                continue
            pins.append(longer)
            # What fails now is tried again before the lease ends; who reads sees more of it.
            with contextlib.suppress(CheckpointError):
                store.pin(longer)
                store.unpin(pins.pop(0))

    try:
        there = store.pin(pins[0])
    except CheckpointError:
        yield
        return
    if not there:
        raise CheckpointError(f"{store.location} has no checkpoint {name_of(*key)}")
    renewing = threading.Thread(target=renew, name="rekindle-reading", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join()
        for pin in pins:
            with contextlib.suppress(CheckpointError):  # it ends by itself
                store.unpin(pin)


def _end(lease_s: float) -> int:
    return math.ceil(time.time() + lease_s)


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
