"""Which checkpoints a job keeps, and which checkpoints it may remove."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.pins import Pin, in_use
from rekindle.errors import CorruptError, NewerFormatError
from rekindle.settings import check_limits
from rekindle.states import StateId


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoints the job keeps when it writes a newer one.

    The job keeps the checkpoints that at least one rule selects. Without a rule it keeps all
    checkpoints.
    """

    last: Annotated[
        int, Meta(ge=0, description="Number of newest checkpoints to keep; 0: no such rule.")
    ] = 0
    every_steps: Annotated[
        int,
        Meta(
            ge=0,
            description="Keep the first checkpoint of each interval of this many steps (with 1000: "
            "of the steps 0 to 999, 1000 to 1999...); 0: no such rule.",
        ),
    ] = 0
    best: Annotated[
        int,
        Meta(
            ge=0,
            description="Number of checkpoints with the best value of the metric to keep; 0: no "
            "such rule.",
        ),
    ] = 0
    metric: Annotated[
        str,
        Meta(
            description="Name of the metric that the training script logs in the step of the "
            "checkpoint."
        ),
    ] = ""
    highest: Annotated[
        bool, Meta(description="Whether the highest value is the best; otherwise the lowest is.")
    ] = False
    hours: Annotated[
        float,
        Meta(
            ge=0,
            description="Keep checkpoints that are at most this many hours old; 0: no such rule.",
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        """Check the rules. Raises ValueError: one is out of limits, or lacks best or metric."""
        check_limits(self, "retention")
        if bool(self.best) != bool(self.metric):
            raise ValueError("retention: best and metric belong together; set both, or neither")

    @property
    def keeps_all(self) -> bool:
        """Return whether all rules are off."""
        return not (self.last or self.every_steps or self.best or self.hours)


class Kept(msgspec.Struct, frozen=True):
    """The facts of a finished checkpoint for the rules. created: seconds since the epoch."""

    key: StateId
    created: float
    metrics: Mapping[str, float]


def superfluous(
    finished: Collection[Kept],
    *,
    proven: Sequence[StateId],
    in_use: Collection[StateId],
    retention: Retention,
    now: float,
) -> tuple[StateId, ...]:
    """Return the checkpoints that the job may remove, newest first.

    proven: the newest checkpoints with all bytes verified, newest first: as many as `last`, and at
    least one. With fewer, the job must not remove any. The job also keeps checkpoints that are
    newer than the last of them: damaged ones are evidence. in_use: pinned, also by a reader.
    """
    wanted = max(1, retention.last)
    if retention.keeps_all or len(proven) < wanted:
        return ()
    # Sorted by generation, then step: a job that could not use a state makes lower steps again.
    by_time = sorted((each.key for each in finished), key=lambda key: key[::-1], reverse=True)
    kept = {
        *in_use,
        *by_time[:wanted],
        *_spaced(finished, retention.every_steps),
        *_best(finished, retention),
        *_young(finished, retention.hours, now),
    }
    oldest = proven[wanted - 1]
    old = (each.key for each in finished if each.key < oldest and each.key not in kept)
    return tuple(sorted(old, reverse=True))


def _young(finished: Collection[Kept], hours: float, now: float) -> set[StateId]:
    return {each.key for each in finished if hours and now - each.created <= hours * 3600}


def _spaced(finished: Collection[Kept], every: int) -> set[StateId]:
    """Return the lowest step of each interval of `every` steps, in its newest generation."""
    first: dict[int, StateId] = {}
    for state in (each.key for each in finished) if every else ():
        known = first.get(state.step // every, state)
        newer = (state.step, -state.generation) <= (known.step, -known.generation)
        first[state.step // every] = state if newer else known
    return set(first.values())


def _best(finished: Collection[Kept], retention: Retention) -> set[StateId]:
    """Return the checkpoints with the best metric. If two are equal, the newer one is better."""
    sign = -1.0 if retention.highest else 1.0
    known = [each for each in finished if retention.metric in each.metrics]
    known.sort(key=lambda each: each.key, reverse=True)
    known.sort(key=lambda each: sign * each.metrics[retention.metric])
    return {each.key for each in known[: retention.best]}


def may_go(
    finished: Sequence[StateId],
    retention: Retention,
    *,
    is_valid: Callable[[StateId], bool],
    manifest_of: Callable[[StateId], Manifest],
    pins: Collection[Pin],
    now: float,
) -> tuple[StateId, ...]:
    """Return the checkpoints that neither a rule nor a pin keeps, newest first.

    finished: newest first. is_valid: whether all bytes are valid; called as rarely as the rules
    allow. manifest_of: called only if a rule uses the manifest. It raises CorruptError or OSError
    for a damaged checkpoint, and NewerFormatError for one of a later version. now: seconds since
    the epoch.
    """
    if retention.keeps_all:
        return ()

    def kept(key: StateId) -> Kept:
        # A damaged checkpoint is old, and has no metric.
        created, metrics = 0.0, {}
        if retention.best or retention.hours:
            with contextlib.suppress(CorruptError, NewerFormatError, OSError):
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
