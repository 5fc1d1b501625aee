"""Publishing a checkpoint: a verified copy, made once, with a reference that stays.

    <location of the place>/<job id>/<checkpoint>#<checksum>

The checksum is that of what the checkpoint holds, so whoever has a reference can tell that nothing
was changed since; it is the same wherever the checkpoint is copied to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

from rekindle.checkpoints.checkpoint_path import key_of, name_of
from rekindle.checkpoints.copying import copy
from rekindle.checkpoints.location import above, below
from rekindle.checkpoints.manifest import identity
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.store import Checkpoint
from rekindle.checkpoints.verifying import Told
from rekindle.errors import CheckpointError, CorruptError, UsageError

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
