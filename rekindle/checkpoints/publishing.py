"""Publishing a checkpoint: a verified copy with a reference, and how readers find the newest.

    <location of the place>/<job id>/<checkpoint>#<checksum>

The checksum is that of what the checkpoint holds, so whoever has a reference can tell that nothing
was changed since; it is the same wherever the checkpoint is copied to.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from rekindle.checkpoints.checkpoint_path import key_of, name_of
from rekindle.checkpoints.location import above, below
from rekindle.checkpoints.manifest import identity
from rekindle.checkpoints.open_store import open_pointer, open_store
from rekindle.checkpoints.store import Checkpoint
from rekindle.checkpoints.verifying import Told, copy
from rekindle.errors import CheckpointError, CorruptError, UsageError

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


_REFERENCE = re.compile(r".+#xxh3_128:[0-9a-f]{32}")


class Published(msgspec.Struct, frozen=True):
    """A published checkpoint.

    reference: what `resolve()` takes. location: of the checkpoint, as people and tools name it.
    existed: it had been published before.
    """

    reference: str
    location: str
    step: int
    bytes: int
    existed: bool


def publish(
    checkpoint: Checkpoint,
    to: str,
    environment: Mapping[str, str] = os.environ,
    told: Told = lambda _: None,
) -> Published:
    """Copy a checkpoint to the store of its job below the location `to`; every byte is verified.

    Doing it again gives the same reference, and writes nothing. told: of bytes as they are copied.
    Raises CorruptError: the checkpoint is not what was written. CheckpointError: it cannot be read
    or copied. UsageError: the location is none.
    """
    manifest = checkpoint.manifest
    where = below(to, manifest.job_id)
    written = copy(checkpoint, open_store(where, environment), told)
    name = name_of(manifest.step, manifest.generation)
    return Published(
        reference=f"{below(where, name)}#{identity(manifest)}",
        location=written.location,
        step=manifest.step,
        bytes=written.bytes,
        existed=written.existed,
    )


def is_reference(text: str) -> bool:
    """Whether a text has the form of a reference."""
    return _REFERENCE.fullmatch(text) is not None


def resolve(reference: str, environment: Mapping[str, str] = os.environ) -> Checkpoint:
    """The checkpoint that was published under this reference; who reads a file has it verified.

    Raises UsageError: the text is no reference. CorruptError: what is there is not what was
    published. CheckpointError: it is not there (any more), or the store cannot be read.
    """
    location, _, digest = reference.rpartition("#")
    where, name = above(location)
    key = key_of(name)
    if not is_reference(reference) or key is None:
        raise UsageError(f"{reference!r} is no reference of a published checkpoint")
    checkpoint = open_store(where, environment).find(*key)
    if checkpoint is None:
        raise CheckpointError(f"{location} is not there, or not complete")
    found = identity(checkpoint.manifest)
    if found != digest:
        raise CorruptError(f"{location} is not what was published: it is {found}, not {digest}")
    return checkpoint
