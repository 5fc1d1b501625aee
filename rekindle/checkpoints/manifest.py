"""The manifest: what a checkpoint consists of. It is written last; without it there is none.

It is one JSON object, {"checksum": ..., "manifest": {...}}. The checksum is that of the exact text
of the inner object, so that a torn or altered manifest is recognised on any file system.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec

from rekindle.checkpoints.format import checksum
from rekindle.errors import CheckpointError, CorruptError, NewerFormatError

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

    checksum: as rekindle.checkpoints.format.checksum gives it. stored: its name in the checkpoint's
    place, if that is another one. blocks: the xxh3_64 of each block_bytes, the last may be shorter.
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
        """The name of the file, or object, that holds it."""
        return self.stored or self.name


class ShardLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ranks have the state among them.

    shards: pieces that it is in, each a file. mesh: the ranks' device mesh, sizes by the names of
    its dimensions; empty: there was none. Which part of which tensor a file holds, it says itself
    (`pieces` in its safetensors metadata): here, that would grow with shards times tensors.
    """

    shards: int = 1
    mesh: dict[str, int] = {}


class StateOrigin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ranks say of the state that they have.

    versions: of what it was made with (torch, python), by name. rng: what the random streams of
    each step follow from.
    """

    versions: dict[str, str] = {}
    layout: ShardLayout = ShardLayout()
    rng: dict[str, int | str] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds, and who wrote it.

    data_position: where the data of the next step begins; values that JSON keeps unchanged.
    origin: what the ranks said of the state. metrics: what the step has logged, by name: finite
    numbers. created: seconds since the epoch. rekindle: version of the writer.
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


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outer object."""

    checksum: str
    manifest: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    """The one field that every version of a manifest has."""

    format: int


def encode(manifest: Manifest) -> bytes:
    """The manifest as it stands in its file.

    Raises CheckpointError if it would not be read back as it is.
    """
    try:
        text = msgspec.json.encode(manifest)
        data = msgspec.json.encode(_Envelope(checksum([text]), msgspec.Raw(text)))
        read_back = decode(data)
    except (CorruptError, TypeError, *_JSON_ERRORS) as error:
        raise CheckpointError(f"the manifest cannot be written: {error}") from error
    if read_back != manifest:
        raise CheckpointError(
            "the data position would not be read back as it is: "
            "use only what JSON keeps (lists, not tuples; keys that are text; no NaN)"
        )
    return data


def identity(manifest: Manifest) -> str:
    """The checksum of what a checkpoint holds; not of how a store keeps it, nor of who wrote it.

    Of named fields alone, so that a manifest that tells more one day has the same.
    """
    files = sorted((entry.name, entry.bytes, entry.checksum) for entry in manifest.files)
    about = (manifest.job_id, manifest.step, manifest.generation, manifest.world_size)
    more = (manifest.framework, manifest.origin.rng, manifest.data_position, manifest.metrics)
    return checksum([msgspec.json.encode((about, more, files), order="sorted")])


def decode(data: bytes) -> Manifest:
    """The manifest in these bytes.

    Raises CorruptError, which says what is wrong, unless they hold what encode() gave;
    NewerFormatError if a later version did.
    """
    if not data:
        raise CorruptError("the manifest is empty: the write was not finished")
    envelope = _decode(data, _Envelope)
    actual = checksum([bytes(envelope.manifest)])
    if actual != envelope.checksum:
        raise CorruptError(
            f"the manifest's text has checksum {actual}, it says {envelope.checksum}"
        )
    version = _decode(envelope.manifest, _Version).format
    if version != FORMAT:
        raise (NewerFormatError if version > FORMAT else CorruptError)(
            f"the manifest has format {version}, this Rekindle reads {FORMAT}: "
            "use the version of Rekindle that wrote it, or a later one"
        )
    manifest = _decode(envelope.manifest, Manifest)
    _check_files(manifest)
    return manifest


def _decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except _JSON_ERRORS as error:
        raise CorruptError(f"the manifest is torn or was never one: {error}") from error


def _check_files(manifest: Manifest) -> None:
    """Raise CorruptError unless each file has names of its own that stay in its directory."""
    names, files = {MANIFEST_FILE}, {MANIFEST_FILE}
    for entry in manifest.files:
        for name, seen in ((entry.name, names), (entry.file, files)):
            if not _FILE_NAME.fullmatch(name):
                raise CorruptError(f"the manifest names a file {name!r}, which is not allowed")
            if name in seen:
                raise CorruptError(f"the manifest names the file {name!r} twice")
            seen.add(name)
        if entry.blocks and len(entry.blocks) * entry.block_bytes - entry.bytes not in range(
            entry.block_bytes
        ):
            raise CorruptError(f"the blocks that the manifest names of {entry.name!r} are not all")
