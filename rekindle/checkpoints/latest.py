"""The newest of what is published in one place, for those who were not told its reference."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final

import msgspec

from rekindle.checkpoints.open_store import open_pointer
from rekindle.errors import CheckpointError, CorruptError

LATEST_FILE: Final = "latest.json"
_TRIES: Final = 20  # so many publish to one place at the same moment, or something else is wrong


class Latest(msgspec.Struct, frozen=True, kw_only=True):
    """What the pointer tells; created: when the checkpoint was made, in seconds since the epoch."""

    reference: str
    location: str
    job_id: str
    step: int
    created: float
    metrics: dict[str, float] = {}


def announce(latest: Latest, to: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Make this the latest at the location `to`; False: a newer one is.

    Newer is what was made later: a flow run of last week may be run again.
    Raises CheckpointError: it cannot be read or written, or it is damaged, or a metric is not
    finite.
    """
    if not all(map(math.isfinite, latest.metrics.values())):
        raise CheckpointError(f"metrics that are not finite cannot be told: {latest.metrics}")
    pointer = open_pointer(to, LATEST_FILE, environment)
    data = msgspec.json.format(msgspec.json.encode(latest), indent=2)
    for _ in range(_TRIES):
        old = pointer.read()
        if old is not None and _decode(old, pointer.location).created > latest.created:
            return False
        if old == data or pointer.replace(data, old):
            return True
    raise CheckpointError(f"{pointer.location} is replaced all the time by others; try again")


def read_latest(at: str, environment: Mapping[str, str] = os.environ) -> Latest | None:
    """What is the latest at this location; None: nothing was published there.

    Raises CheckpointError: it cannot be read; CorruptError: it is damaged.
    """
    pointer = open_pointer(at, LATEST_FILE, environment)
    data = pointer.read()
    return None if data is None else _decode(data, pointer.location)


def _decode(data: bytes, location: str) -> Latest:
    try:
        return msgspec.json.decode(data, type=Latest)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{location} is damaged, remove it: {error}") from error
