"""Verifying checkpoints in a store, and copying checkpoints between stores.

The functions read every byte, one piece at a time, so a file may be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, overload

import msgspec

from rekindle.checkpoints.block_checksums import BlockSums, Sums, granule
from rekindle.checkpoints.format import Bytes, Header, header_bytes, read_header
from rekindle.checkpoints.manifest import FileEntry, identity
from rekindle.checkpoints.store import (
    Checkpoint,
    CheckpointFile,
    CheckpointStore,
    Written,
    existing,
)
from rekindle.errors import CheckpointError, CorruptError, MissingError

PIECE = 64 << 20  # bytes read together: a store may fetch parts of them in parallel
_HEADER = 1 << 20  # least number of bytes kept of a file's beginning; more if its header is longer

UNREADABLE: Final = "unreadable"

# Called with the number of bytes that were read.
OnBytes = Callable[[int], None]

Range = tuple[int, int]  # first byte, end


class Damage(msgspec.Struct, frozen=True):
    """One file that is not what was written.

    The defect is missing, truncated, too long, changed, or unreadable (`what`). where: the damaged
    bytes and their tensors, if they are known.
    """

    file: str
    what: str
    where: str


def verify(checkpoint: Checkpoint, on_bytes: OnBytes) -> tuple[Damage, ...]:
    """Read all files and return their damages. The result of a valid checkpoint is empty."""
    found = (check_file(checkpoint, entry, on_bytes) for entry in checkpoint.manifest.files)
    return tuple(damage for damage in found if damage is not None)


def check_file(checkpoint: Checkpoint, entry: FileEntry, on_bytes: OnBytes) -> Damage | None:
    """Read a file and return its damage, or None if it agrees with the manifest."""
    sums, kept = BlockSums(granule(entry)), bytearray()
    try:
        for piece in _Chunks(checkpoint, entry):
            if sums.bytes < max(_HEADER, header_bytes(kept)):
                kept += piece
            sums.add(piece)
            on_bytes(len(piece))
        more = checkpoint.read_range(entry.name, sums.bytes, sums.bytes + 1)
    except MissingError:
        return Damage(entry.name, "missing", f"all of its {entry.bytes} bytes")
    except CheckpointError as error:
        return Damage(entry.name, UNREADABLE, str(error))
    if more:
        return Damage(entry.name, "too long", f"it has more than {entry.bytes} bytes")
    damaged = _damaged(entry, sums.sums())
    if not damaged:
        return None
    if sums.bytes < entry.bytes:
        where = f"it ends after {sums.bytes} of {entry.bytes} bytes"
        return Damage(entry.name, "truncated", where + _concerned(entry, kept, damaged))
    shown = [f"bytes {begin} to {end}" for begin, end in damaged[:3]]
    more_of = [f"{len(damaged) - 3} more places"] if len(damaged) > 3 else []
    where = ", ".join(shown + more_of)
    return Damage(entry.name, "changed", where + _concerned(entry, kept, damaged))


def _damaged(entry: FileEntry, found: Sums) -> list[Range]:
    """Return the ranges that are damaged, or may be damaged.

    A file without blocks in the manifest is one block.
    """
    size = granule(entry)
    ranges = [(begin, min(begin + size, entry.bytes)) for begin in range(0, entry.bytes, size)]
    damaged = [
        block
        for block, actual, written in zip(ranges, found.blocks, entry.blocks, strict=False)
        if block[1] <= found.bytes and actual != written
    ]
    if found.bytes < entry.bytes:
        return _joined([*damaged, (found.bytes, entry.bytes)])
    if damaged or found.checksum == entry.checksum:
        return _joined(damaged)
    return [(0, entry.bytes)]


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges in their order. Join ranges that touch."""
    joined: list[Range] = []
    for begin, end in ranges:
        first = joined.pop()[0] if joined and joined[-1][1] == begin else begin
        joined.append((first, end))
    return joined


def _concerned(entry: FileEntry, beginning: Bytes, damaged: Sequence[Range]) -> str:
    """Name the header and the tensors with damaged bytes, if the header is readable."""
    try:
        header = read_header(beginning, entry.bytes)
    except CorruptError as error:
        return f": the header cannot be read ({error}), so no tensor can be"
    found = ["the header"] if any(begin < header.data_begin for begin, _ in damaged) else []
    found += [f"tensor {name}" for name in _tensors_in(header, damaged)]
    if not found:
        return ": outside of all tensors"
    more = f" and {len(found) - 3} more of {len(header.specs)} tensors" if len(found) > 3 else ""
    return f": {', '.join(found[:3])}{more}"


def _tensors_in(header: Header, damaged: Sequence[Range]) -> list[str]:
    """Return the names of the tensors with a byte in one of these ranges."""
    inside = [(begin - header.data_begin, end - header.data_begin) for begin, end in damaged]
    return [
        spec.name
        for spec in header.specs
        if any(begin < spec.end and spec.begin < end for begin, end in inside)
    ]


def copy(
    checkpoint: Checkpoint, to: CheckpointStore, on_bytes: OnBytes, *, job_id: str = ""
) -> Written:
    """Copy a checkpoint that was verified.

    on_bytes: called with the number of bytes that were copied, or that exist in the target.
    job_id: the job that begins with the copy, in generation 0 like an import; empty: the copy
    belongs to the same job and generation.
    Raises CorruptError: the checkpoint has changed since its verification. CheckpointError: it
    cannot be read or written, or the target has another checkpoint of the same step and generation.
    """
    manifest = checkpoint.manifest
    if job_id:
        manifest = msgspec.structs.replace(manifest, job_id=job_id, generation=0)
    there = to.find(*manifest.state)
    if there is not None:
        existing(there.location, there.manifest, manifest.job_id)
        if identity(there.manifest) != identity(manifest):
            raise CheckpointError(
                f"{there.location} has the same step and generation as {checkpoint.location}, "
                "but other content; copy to another location"
            )
    # Each store has its own names for the objects of a file.
    files = [msgspec.structs.replace(entry, stored="") for entry in manifest.files]
    target = to.at(msgspec.structs.replace(manifest, files=tuple(files)))
    for index, entry in enumerate(files):
        if _is_there(target, entry):
            on_bytes(entry.bytes)
            continue
        part = CheckpointFile(_Chunks(checkpoint, entry), entry.ranks, on_bytes)
        files[index] = written = to.write_part(*manifest.state, entry.name, part)
        if (written.bytes, written.checksum) != (entry.bytes, entry.checksum):
            raise CorruptError(
                f"{entry.name} of {checkpoint.location} changed during the copy; Rekindle did "
                "not commit the copy"
            )
    return to.commit(msgspec.structs.replace(manifest, files=tuple(files)))


def check_intact(checkpoint: Checkpoint, on_bytes: OnBytes) -> None:
    """Read and verify all files.

    Raises CorruptError: the message names all damages. CheckpointError: a file cannot be read, so
    its state is unknown.
    """
    damages = verify(checkpoint, on_bytes)
    for each in damages:
        if each.what == UNREADABLE:
            raise CheckpointError(f"{each.file} of {checkpoint.location}: {each.where}")
    if damages:
        found = "; ".join(f"{each.file} is {each.what}: {each.where}" for each in damages)
        raise CorruptError(f"{checkpoint.location} is damaged: {found}")


def _is_there(checkpoint: Checkpoint, entry: FileEntry) -> bool:
    """Return whether the file exists and is intact.

    The function first checks the size, because most files do not exist.
    """
    try:
        last = checkpoint.read_range(entry.name, max(0, entry.bytes - 1), entry.bytes)
    except CorruptError:
        return False
    whole = len(last) == min(1, entry.bytes)
    return whole and check_file(checkpoint, entry, lambda _: None) is None


class _Chunks(Sequence[memoryview]):
    """A file's unverified bytes in pieces. Each is read when it is requested.

    If the file is truncated, the last pieces are shorter or empty.
    """

    def __init__(self, checkpoint: Checkpoint, entry: FileEntry) -> None:
        self._checkpoint = checkpoint
        self._entry = entry
        self._begins = range(0, entry.bytes, PIECE)

    def __len__(self) -> int:
        return len(self._begins)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        begin = self._begins[index]
        end = min(begin + PIECE, self._entry.bytes)
        return self._checkpoint.read_range(self._entry.name, begin, end)
