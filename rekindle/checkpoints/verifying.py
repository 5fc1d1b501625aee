"""Verifies checkpoints in a store, and copies them between stores.

Every byte is read, a piece at a time: what is verified may be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

PIECE = 64 << 20  # bytes read at once: a store may fetch parts of them side by side
_HEADER = 1 << 20  # bytes kept of a file's beginning, or more if its header is longer

UNREADABLE: Final = "unreadable"

# Is told of bytes as they are read.
Told = Callable[[int], None]

Range = tuple[int, int]  # first byte, end


class Damage(msgspec.Struct, frozen=True):
    """One file that is not what was written.

    what: missing, truncated, too long, changed, or unreadable. where: the bytes and the tensors
    that are concerned, as far as that can be told.
    """

    file: str
    what: str
    where: str


def verify(checkpoint: Checkpoint, told: Told) -> tuple[Damage, ...]:
    """Read all files; what is wrong with them, nothing if the checkpoint is as it was written."""
    found = (check_file(checkpoint, entry, told) for entry in checkpoint.manifest.files)
    return tuple(damage for damage in found if damage is not None)


def check_file(checkpoint: Checkpoint, entry: FileEntry, told: Told) -> Damage | None:
    """Read a file; None if it is what the manifest says."""
    sums, kept = BlockSums(granule(entry)), bytearray()
    try:
        for piece in pieces(checkpoint, entry):
            if sums.bytes < max(_HEADER, header_bytes(kept)):
                kept += piece
            sums.add(piece)
            told(len(piece))
        more = checkpoint.read_range(entry.name, sums.bytes, sums.bytes + 1)
    except MissingError:
        return Damage(entry.name, "missing", f"all of its {entry.bytes} bytes")
    except CheckpointError as error:
        return Damage(entry.name, UNREADABLE, str(error))
    if more:
        return Damage(entry.name, "too long", f"it goes on after its {entry.bytes} bytes")
    damaged = _damaged(entry, sums.sums())
    if not damaged:
        return None
    if sums.bytes < entry.bytes:
        where = f"it ends after {sums.bytes} of {entry.bytes} bytes"
        return Damage(entry.name, "truncated", where + _concerned(entry, kept, damaged))
    told_of = [f"bytes {begin} to {end}" for begin, end in damaged[:3]]
    more_of = [f"{len(damaged) - 3} more places"] if len(damaged) > 3 else []
    where = ", ".join(told_of + more_of)
    return Damage(entry.name, "changed", where + _concerned(entry, kept, damaged))


def pieces(checkpoint: Checkpoint, entry: FileEntry) -> Iterator[memoryview]:
    """The file's bytes as they lie there, in order; fewer than the entry says if it is cut off.

    Raises CheckpointError.
    """
    for begin in range(0, entry.bytes, PIECE):
        end = min(begin + PIECE, entry.bytes)
        piece = checkpoint.read_range(entry.name, begin, end)
        yield piece
        if len(piece) < end - begin:
            return


def _damaged(entry: FileEntry, found: Sums) -> list[Range]:
    """The bytes that are not, or not surely, what was written.

    A file whose blocks the manifest does not tell is one block.
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
    """The ranges, in their order, with those made one that touch."""
    joined: list[Range] = []
    for begin, end in ranges:
        first = joined.pop()[0] if joined and joined[-1][1] == begin else begin
        joined.append((first, end))
    return joined


def _concerned(entry: FileEntry, beginning: Bytes, damaged: Sequence[Range]) -> str:
    """The header and the tensors in which these bytes are, as far as the header can be read."""
    try:
        header = read_header(beginning, entry.bytes)
    except CorruptError as error:
        return f": the header cannot be read ({error}), so no tensor can be"
    found = ["the header"] if any(begin < header.data_begin for begin, _ in damaged) else []
    found += [f"tensor {name}" for name in _tensors_in(header, damaged)]
    if not found:
        return ": no tensor is concerned"
    more = f" and {len(found) - 3} more of {len(header.specs)} tensors" if len(found) > 3 else ""
    return f": {', '.join(found[:3])}{more}"


def _tensors_in(header: Header, damaged: Sequence[Range]) -> list[str]:
    """The names of the tensors with a byte in one of these ranges."""
    inside = [(begin - header.data_begin, end - header.data_begin) for begin, end in damaged]
    return [
        spec.name
        for spec in header.specs
        if any(begin < spec.end and spec.begin < end for begin, end in inside)
    ]


def copy(checkpoint: Checkpoint, to: CheckpointStore, told: Told) -> Written:
    """Copy a checkpoint that was verified; told of its bytes as they are copied, or found there.

    Raises CorruptError: it has changed since. CheckpointError: it cannot be read or written, or
    another checkpoint is in its place.
    """
    manifest = checkpoint.manifest
    place = (manifest.step, manifest.generation)
    there = to.find(*place)
    if there is not None:
        existing(there.location, there.manifest, manifest.job_id)
        if identity(there.manifest) != identity(manifest):
            raise CheckpointError(
                f"{there.location} is another checkpoint of the same step and generation than "
                f"{checkpoint.location}: copy to another place"
            )
    # Each store has its own names for what holds a file.
    files = [msgspec.structs.replace(entry, stored="") for entry in manifest.files]
    target = to.at(msgspec.structs.replace(manifest, files=tuple(files)))
    for index, entry in enumerate(files):
        if _is_there(target, entry):
            told(entry.bytes)
            continue
        part = CheckpointFile(_Chunks(checkpoint, entry), entry.ranks, told)
        files[index] = written = to.write_part(*place, entry.name, part)
        if (written.bytes, written.checksum) != (entry.bytes, entry.checksum):
            raise CorruptError(
                f"{entry.name} of {checkpoint.location} has changed while it was copied; "
                "nothing was committed"
            )
    return to.commit(msgspec.structs.replace(manifest, files=tuple(files)))


def check_intact(checkpoint: Checkpoint, told: Told) -> None:
    """Read all of it.

    Raises CorruptError, which names what is wrong; CheckpointError if some of it cannot be read,
    which says nothing of what is there.
    """
    damages = verify(checkpoint, told)
    for each in damages:
        if each.what == UNREADABLE:
            raise CheckpointError(f"{each.file} of {checkpoint.location}: {each.where}")
    if damages:
        found = "; ".join(f"{each.file} is {each.what}: {each.where}" for each in damages)
        raise CorruptError(f"{checkpoint.location} is damaged: {found}")


def _is_there(checkpoint: Checkpoint, entry: FileEntry) -> bool:
    """Whether the file lies there, intact, by its size first: most often there is none."""
    try:
        last = checkpoint.read_range(entry.name, max(0, entry.bytes - 1), entry.bytes)
    except CorruptError:
        return False
    whole = len(last) == min(1, entry.bytes)
    return whole and check_file(checkpoint, entry, lambda _: None) is None


class _Chunks(Sequence[memoryview]):
    """A file's bytes as the chunks of a part, each read when it is asked for."""

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
