"""Publishing a checkpoint: a verified copy with a reference, and a pointer to the newest copy.

    <location of the place>/<job id>/<checkpoint>#<checksum>

The checksum covers the contents of the checkpoint. A reader with a reference can therefore detect a
change. A copy of the checkpoint in another place has the same checksum.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from rekindle.checkpoints.checkpoint_path import key_of, name_of
from rekindle.checkpoints.location import S3Location, above, below, parse
from rekindle.checkpoints.manifest import identity
from rekindle.checkpoints.open_store import open_pointer, open_store
from rekindle.checkpoints.store import Checkpoint
from rekindle.checkpoints.verifying import OnBytes, copy
from rekindle.errors import CheckpointError, CorruptError, UsageError

LATEST_FILE: Final = "latest.json"
_TRIES: Final = 20  # attempts: if all fail, the cause is hardly other publishers
_REFERENCE = re.compile(r".+#xxh3_128:[0-9a-f]{32}")


class Latest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the pointer. created: time of the checkpoint, in seconds since the epoch.

    replaced: the contents before, without their own `replaced`; None: there were none.
    """

    reference: str
    location: str
    job_id: str
    step: int
    created: float
    metrics: dict[str, float] = {}
    replaced: Latest | None = None

    def alone(self) -> Latest:
        """Return the same without what it has replaced."""
        return msgspec.structs.replace(self, replaced=None)


def announce(latest: Latest, to: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Make this the latest at the location `to`. Return False if the present one is newer.

    The later `created` is newer, because a user may run an old flow run again. The pointer also has
    what it replaces, so that `withdraw` can return it.
    Raises CheckpointError: the pointer cannot be read or written, or is damaged, or a metric is not
    finite.
    """
    if not all(map(math.isfinite, latest.metrics.values())):
        raise CheckpointError(
            f"Rekindle cannot publish a metric that is not finite: {latest.metrics}"
        )
    pointer = open_pointer(to, LATEST_FILE, environment)
    for _ in range(_TRIES):
        old = pointer.read()
        present = None if old is None else _decode(old, pointer.location).alone()
        if present is not None and present.created > latest.created:
            return False
        if present == latest:
            return True
        if pointer.replace(_encode(msgspec.structs.replace(latest, replaced=present)), old):
            return True
    raise CheckpointError(f"other processes replaced {pointer.location} during each try; try again")


def withdraw(latest: Latest, to: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return the pointer at `to` to what it had before `latest`. Return whether this was done.

    It is not done if the pointer has something else by now. Raises CheckpointError as announce().
    """
    pointer = open_pointer(to, LATEST_FILE, environment)
    old = pointer.read()
    present = None if old is None else _decode(old, pointer.location)
    if old is None or present is None or present.alone() != latest:
        return False
    if present.replaced is None:
        return pointer.remove(old)
    return pointer.replace(_encode(present.replaced), old)


def _encode(latest: Latest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(latest), indent=2)


def _decode(data: bytes, location: str) -> Latest:
    try:
        return msgspec.json.decode(data, type=Latest)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{location} is damaged; remove it ({error})") from error


class Published(msgspec.Struct, frozen=True):
    """A published checkpoint.

    reference: the text that `resolve()` accepts. location: the checkpoint's location in the form
    that users see. existed: the checkpoint had been published before.
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
    on_bytes: OnBytes = lambda _: None,
) -> Published:
    """Copy a checkpoint to its job's store below the location `to`, and verify every byte.

    A second call returns the same reference, and writes nothing. on_bytes: called with the number
    of bytes that were copied.
    Raises CorruptError: the checkpoint is not what was written. CheckpointError: it cannot be read
    or copied. UsageError: the location is not valid.
    """
    manifest = checkpoint.manifest
    where = below(to, manifest.job_id)
    written = copy(checkpoint, open_store(where, environment), on_bytes)
    name = name_of(*manifest.state)
    return Published(
        reference=f"{below(where, name)}#{identity(manifest)}",
        location=written.location,
        step=manifest.step,
        bytes=written.bytes,
        existed=written.existed,
    )


def address(checkpoint: Checkpoint, to: str) -> str:
    """Return where publish() puts a checkpoint, in the form that users see.

    Raises UsageError: the location is not valid.
    """
    manifest = checkpoint.manifest
    where = parse(below(below(to, manifest.job_id), name_of(*manifest.state)))
    return where.url() if isinstance(where, S3Location) else str(where)


def is_reference(text: str) -> bool:
    """Return whether a text has the form of a reference."""
    return _REFERENCE.fullmatch(text) is not None


def resolve(reference: str, environment: Mapping[str, str] = os.environ) -> Checkpoint:
    """Return the checkpoint that was published under this reference.

    The function compares the manifest with the reference. The checkpoint's read() verifies the
    bytes.
    Raises UsageError: the text is not a reference. CorruptError: the checkpoint differs from the
    published one. CheckpointError: it does not exist or is not complete, or the store cannot be
    read.
    """
    location, _, digest = reference.rpartition("#")
    where, name = above(location)
    key = key_of(name)
    if not is_reference(reference) or key is None:
        raise UsageError(f"{reference!r} is not a reference of a published checkpoint")
    checkpoint = open_store(where, environment).find(*key)
    if checkpoint is None:
        raise CheckpointError(f"there is no complete checkpoint at {location}")
    found = identity(checkpoint.manifest)
    if found != digest:
        raise CorruptError(
            f"{location} has changed since it was published: its checksum is {found}, not {digest}"
        )
    return checkpoint
