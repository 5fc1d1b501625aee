"""Which checkpoints of a store may go: a retention's rules, asked of whatever it is made of."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence

from rekindle.checkpoints.checkpoint_path import Key
from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.pins import Pin, in_use
from rekindle.checkpoints.retention import Kept, Retention, superfluous
from rekindle.errors import CorruptError


def may_go(
    finished: Sequence[Key],
    retention: Retention,
    *,
    is_valid: Callable[[Key], bool],
    manifest_of: Callable[[Key], Manifest],
    pins: Collection[Pin],
    now: float,
) -> tuple[Key, ...]:
    """The checkpoints that no rule and no pin keeps, newest first.

    finished: newest first. is_valid: in every byte; asked of as few as the rules allow.
    manifest_of: asked only where a rule is about it; of a damaged one it raises CorruptError or
    OSError. now: seconds since the epoch.
    """
    if retention.keeps_all:
        return ()

    def kept(key: Key) -> Kept:
        # A damaged one is old, and the best by nothing.
        created, metrics = 0.0, {}
        if retention.best or retention.hours:
            with contextlib.suppress(CorruptError, OSError):
                manifest = manifest_of(key)
                created, metrics = manifest.created, manifest.metrics
        return Kept(key, created, metrics)

    return superfluous(
        [kept(key) for key in finished],
        proven=list(itertools.islice(filter(is_valid, finished), max(1, retention.last))),
        in_use=in_use(pins, now),
        retention=retention,
        now=now,
    )
