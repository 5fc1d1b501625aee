"""The manifest: the description of a checkpoint. Without a manifest, a checkpoint does not exist.

A writer writes the manifest last. It is one JSON object, {"checksum": ..., "manifest": {...}}. The
checksum covers the exact text of the inner object, so a reader detects a torn or altered manifest
on any file system.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec

from rekindle.checkpoints.format import checksum
from rekindle.errors import CheckpointError, CorruptError, NewerFormatError
from rekindle.states import StateId

FORMAT: Final = 1
MANIFEST_FILE: Final = "manifest.json"

Count = Annotated[int, msgspec.Meta(ge=0)]
T = TypeVar("T")

# Narrow on purpose: the same name must be safe as a file, as an object key and in a shell.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_JSON_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


class FileEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One file of the checkpoint: its size in bytes, its checksum, the ranks whose state it holds.

    checksum: the result of rekindle.checkpoints.format.checksum. stored: the name of the file or
    object in the checkpoint, if it differs from `name`. blocks: the xxh3_64 of each block_bytes.
    The last block may be shorter.
    """

    name: str
    bytes: Count
    checksum: Annotated[str, msgspec.Meta(pattern=r"\Axxh3_128:[0-9a-f]{32}\Z")]
    ranks: tuple[Count, ...] = ()
    stored: str = ""
    block_bytes: Count = 0
    blocks: tuple[Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")], ...] = ()

    @property
    def file(self) -> str:
        """Return the name of the file, or object, that holds it."""
        return self.stored or self.name


class ShardLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the state is distributed over the ranks.

    shards: number of shards of the state, each in one file. mesh: the ranks' device mesh, sizes by
    the names of its dimensions; empty: the ranks have no mesh. The metadata of each safetensors
    file (`pieces`) lists the parts of the tensors in it. In the manifest, this list would grow with
    shards times tensors.
    """

    shards: int = 1
    mesh: dict[str, int] = {}


class StateOrigin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts that the ranks report about their state.

    versions: versions of the software that made the state (torch, python), by name. rng: values
    that determine the random streams of each step.
    """

    versions: dict[str, str] = {}
    layout: ShardLayout = ShardLayout()
    rng: dict[str, int | str] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a checkpoint, and its writer.

    data_position: the position of the next step's data. It has only values that JSON keeps
    unchanged.

    origin: facts that the ranks reported about the state. metrics: the finite numbers that the step
    has logged, by name. created: seconds since the epoch. rekindle: version of the writer.
    """

    format: int = FORMAT
    job_id: str
    step: Count
    generation: Count
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    framework: str
    origin: StateOrigin = StateOrigin()
    data_position: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    files: tuple[FileEntry, ...] = ()
    created: float
    writer: str
    rekindle: str

    @property
    def state(self) -> StateId:
        """Return the state that the checkpoint holds."""
        return StateId(self.step, self.generation)


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outer object."""

    checksum: str
    manifest: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    """The one field that every version of a manifest has."""

    format: int


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest's file.

    Raises CheckpointError if decode() would return a different manifest.
    """
    try:
        text = msgspec.json.encode(manifest)
        data = msgspec.json.encode(_Envelope(checksum([text]), msgspec.Raw(text)))
        read_back = decode(data)
    except (CorruptError, TypeError, *_JSON_ERRORS) as error:
        raise CheckpointError(f"Rekindle cannot write the manifest: {error}") from error
    if read_back != manifest:
        raise CheckpointError(
            "JSON cannot represent the data position exactly; use lists instead of tuples, text "
            "as keys, and no NaN"
        )
    return data


def identity(manifest: Manifest) -> str:
    """Return the checksum of a checkpoint's contents, independent of its store and its writer.

    The checksum covers named fields only. A later version of the manifest with more fields
    therefore has the same checksum.
    """
    files = sorted((entry.name, entry.bytes, entry.checksum) for entry in manifest.files)
    about = (manifest.job_id, manifest.step, manifest.generation, manifest.world_size)
    more = (manifest.framework, manifest.origin.rng, manifest.data_position, manifest.metrics)
    return checksum([msgspec.json.encode((about, more, files), order="sorted")])


def decode(data: bytes) -> Manifest:
    """Return the manifest in these bytes.

    Raises CorruptError, with the reason, unless the bytes are a result of encode().
    NewerFormatError: a later version of Rekindle wrote them.
    """
    if not data:
        raise CorruptError("the manifest is empty, because the write did not finish")
    envelope = _decode(data, _Envelope)
    actual = checksum([bytes(envelope.manifest)])
    if actual != envelope.checksum:
        raise CorruptError(
            f"the manifest's text has checksum {actual}, but the manifest has {envelope.checksum}"
        )
    version = _decode(envelope.manifest, _Version).format
    if version != FORMAT:
        raise (NewerFormatError if version > FORMAT else CorruptError)(
            f"the manifest has format {version}, but this version of Rekindle reads {FORMAT}; "
            "use the version that wrote it, or a later one"
        )
    manifest = _decode(envelope.manifest, Manifest)
    _check_files(manifest)
    return manifest


def _decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except _JSON_ERRORS as error:
        raise CorruptError(f"the file is incomplete or is not a manifest: {error}") from error


def _check_files(manifest: Manifest) -> None:
    """Raise CorruptError unless file names are unique and safe, and the blocks cover each file."""
    names, files = {MANIFEST_FILE}, {MANIFEST_FILE}
    for entry in manifest.files:
        for name, names_so_far in ((entry.name, names), (entry.file, files)):
            if not _FILE_NAME.fullmatch(name):
                raise CorruptError(
                    f"the manifest lists the file name {name!r}, which is not allowed"
                )
            if name in names_so_far:
                raise CorruptError(f"the manifest lists the file {name!r} twice")
            names_so_far.add(name)
        if entry.blocks and len(entry.blocks) * entry.block_bytes - entry.bytes not in range(
            entry.block_bytes
        ):
            raise CorruptError(f"the manifest does not list all blocks of {entry.name!r}")
