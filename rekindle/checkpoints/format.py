"""The safetensors layout in a buffer of constant size, and the names of a checkpoint's files.

A buffer holds an 8-byte length, a JSON header padded with spaces to a constant length, and the
bytes of the tensors without a gap. The `safetensors` library reads the same bytes from a file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
import xxhash

from rekindle.errors import CheckpointError, CorruptError

# Keys of the snapshot's metadata, each a JSON object.
METADATA_POSITION = "data_position"
METADATA_ORIGIN = "origin"
METADATA_METRICS = "metrics"

# Bits of one element, by the dtype codes of safetensors.
DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

Bytes = bytes | bytearray | memoryview
_ALIGNMENT = 64  # bytes, for the first tensor: a cache line, and more than any dtype needs
_PREFIX = struct.Struct("<Q")
_MAX_JSON = 100_000_000  # the safetensors library refuses a longer header
_METADATA = "__metadata__"
_JSON_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


def state_file(shard: int) -> str:
    """Return the name of the file with this shard. A state without shards is shard 0."""
    return f"state-{shard:05d}.safetensors"


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor; begin and end are byte offsets from the first byte of data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class FileLayout(msgspec.Struct, frozen=True):
    """Positions in the buffer: header_bytes of header, then data_bytes of tensors.

    specs: in the order of the data. The element size falls in this order, so each tensor is aligned
    to its own element size.
    """

    specs: tuple[TensorSpec, ...]
    header_bytes: int
    data_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the size of the buffer, which is the size of the file."""
        return self.header_bytes + self.data_bytes


class Header(msgspec.Struct, frozen=True):
    """The header of a buffer. data_begin: the byte at which its tensors begin."""

    metadata: dict[str, str]
    specs: tuple[TensorSpec, ...]
    data_begin: int


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the JSON header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def plan_layout(
    tensors: Iterable[tuple[str, str, Iterable[int]]], metadata_room: int
) -> FileLayout:
    """Return the layout of these (name, dtype, shape).

    metadata_room: the least number of bytes that are reserved for the JSON object of the metadata.
    Raises CheckpointError: the format cannot hold these tensors.
    """
    planned = [_measure(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
    names = {spec.name for spec in planned}
    if len(names) < len(planned) or _METADATA in names:
        raise CheckpointError(
            f"{len(planned)} tensors have {len(names)} different names; give each tensor its own "
            f"name, and do not use {_METADATA!r}"
        )
    planned.sort(key=lambda spec: -DTYPE_BITS[spec.dtype])
    specs, offset = [], 0
    for spec in planned:
        specs.append(msgspec.structs.replace(spec, begin=offset, end=offset + spec.end))
        offset += spec.end
    empty = len(_encode(specs, {}))
    header_bytes = _PREFIX.size + empty + max(0, metadata_room - len("{}"))
    header_bytes += -header_bytes % _ALIGNMENT
    if header_bytes - _PREFIX.size > _MAX_JSON:
        raise CheckpointError(
            f"the header needs {header_bytes} bytes, safetensors allows {_MAX_JSON}: "
            "split the state into more files or shorten its names"
        )
    return FileLayout(tuple(specs), header_bytes, offset)


def write_header(layout: FileLayout, metadata: Mapping[str, str], buffer: memoryview) -> None:
    """Write the header for these tensors and metadata into the first header_bytes of the buffer.

    Raises CheckpointError if the buffer is too small or the metadata does not fit its room.
    """
    if buffer.nbytes < layout.total_bytes:
        raise CheckpointError(
            f"the buffer has {buffer.nbytes} bytes, but the layout needs {layout.total_bytes}"
        )
    buffer.cast("B")[: layout.header_bytes] = encode_header(layout, metadata)


def encode_header(layout: FileLayout, metadata: Mapping[str, str]) -> bytes:
    """Return the header for these tensors and metadata, header_bytes long.

    Raises CheckpointError if the metadata does not fit its room.
    """
    text = _encode(layout.specs, metadata)
    room = layout.header_bytes - _PREFIX.size
    if len(text) > room:
        raise CheckpointError(
            f"the metadata is {len(text) - room} bytes longer than the space for it; plan the "
            "layout with a larger metadata_room"
        )
    return _PREFIX.pack(room) + text.ljust(room)


def read_header(buffer: Bytes, total: int | None = None) -> Header:
    """Return the header of a complete file, or of a buffer of exactly its size.

    total: bytes of the file, if the buffer holds only the header.
    Raises CorruptError, with the reason, if the bytes are not safetensors.
    """
    with memoryview(buffer).cast("B") as view:
        total = len(view) if total is None else total
        text = _header_text(view)
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw = entries.pop(_METADATA, msgspec.Raw(b"{}"))
        metadata = msgspec.json.decode(raw, type=dict[str, str])
        specs = [_read_spec(name, entry) for name, entry in entries.items()]
    except _JSON_ERRORS as error:
        raise CorruptError(
            f"the file does not have the header of a safetensors file: {error}"
        ) from error
    specs.sort(key=lambda spec: (spec.begin, spec.end))
    data_begin = _PREFIX.size + len(text)
    _check_gapless(specs, total - data_begin)
    return Header(metadata, tuple(specs), data_begin)


def header_bytes(beginning: Bytes) -> int:
    """Return the header's bytes, with the length field, as the file claims; 0: impossible."""
    if len(beginning) < _PREFIX.size:
        return 0
    claimed: int = _PREFIX.unpack_from(beginning)[0]
    return _PREFIX.size + claimed if claimed <= _MAX_JSON else 0


class BlockDigests:
    """Computes the digest of each block of a sequence of bytes. bytes: their number so far.

    new: makes a hash object. The last block may be shorter.
    """

    def __init__(self, block_bytes: int, new: type[xxhash.xxh3_64 | xxhash.xxh3_128]) -> None:
        self.bytes = 0
        self._block_bytes, self._block = block_bytes, new()
        self._digests: list[bytes] = []

    def add(self, chunk: memoryview) -> None:
        """Add the next bytes. The size of the chunks does not change the result."""
        while chunk:
            piece = chunk[: self._block_bytes - self.bytes % self._block_bytes]
            self._block.update(piece)
            self.bytes += len(piece)
            chunk = chunk[len(piece) :]
            if self.bytes % self._block_bytes == 0:
                self._digests.append(self._block.digest())
                self._block.reset()

    def digests(self) -> list[bytes]:
        """Return the digests of all blocks in their order."""
        last = [self._block.digest()] if self.bytes % self._block_bytes else []
        return self._digests + last


def checksum(chunks: Iterable[Bytes]) -> str:
    """Return the checksum of these bytes: "xxh3_128:<32 hex digits>".

    It detects damage. It does not prove which process wrote the bytes.
    """
    whole = xxhash.xxh3_128()
    for chunk in chunks:
        whole.update(chunk)
    return checksum_of(whole)


def checksum_of(whole: xxhash.xxh3_128) -> str:
    """Return the text of a computed checksum."""
    return f"xxh3_128:{whole.hexdigest()}"


def _measure(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """Return the spec of a tensor, as if it were the first one."""
    try:
        return TensorSpec(name, dtype, shape, 0, _tensor_bytes(dtype, shape))
    except ValueError as error:
        raise CheckpointError(f"Rekindle cannot store tensor {name!r}: {error}") from error


def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. Raises ValueError: no file can hold it."""
    if dtype not in DTYPE_BITS:
        raise ValueError(f"dtype {dtype!r} is unknown; use one of {', '.join(sorted(DTYPE_BITS))}")
    elements = 1
    for extent in shape:
        elements *= extent
        # Checked in the loop, because the product of a hostile shape would take too long to
        # compute.
        if extent < 0 or elements >= 2**64:
            raise ValueError(f"its shape contains the invalid extent {extent}")
    bits = elements * DTYPE_BITS[dtype]
    if bits % 8:
        raise ValueError(f"{elements} elements of {dtype} do not fill whole bytes")
    return bits // 8


def _encode(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the JSON header without padding."""
    entries = {spec.name: _Entry(spec.dtype, spec.shape, (spec.begin, spec.end)) for spec in specs}
    try:
        return msgspec.json.encode({_METADATA: dict(metadata), **entries})
    except UnicodeError as error:
        raise CheckpointError(f"names and metadata must be valid text: {error}") from error


def _header_text(view: memoryview) -> bytes:
    """Return a copy of the JSON header. Allocate no memory for a length that exceeds the file."""
    if len(view) < _PREFIX.size:
        raise CorruptError(f"{len(view)} bytes cannot hold a safetensors header")
    (length,) = _PREFIX.unpack_from(view)
    if length > min(_MAX_JSON, len(view) - _PREFIX.size):
        raise CorruptError(
            f"the header length is {length} bytes, but the whole file has {len(view)}"
        )
    return bytes(view[_PREFIX.size : _PREFIX.size + length])


def _read_spec(name: str, raw: msgspec.Raw) -> TensorSpec:
    """Return the spec of one entry. Raises ValueError: the entry contradicts itself."""
    entry = msgspec.json.decode(raw, type=_Entry)
    begin, end = entry.data_offsets
    try:
        expected = _tensor_bytes(entry.dtype, entry.shape)
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from error
    if end - begin != expected:
        raise ValueError(
            f"tensor {name!r} has bytes {begin} to {end}, but its dtype and shape need "
            f"{expected} bytes"
        )
    return TensorSpec(name, entry.dtype, entry.shape, begin, end)


def _check_gapless(specs: Iterable[TensorSpec], data_bytes: int) -> None:
    """Raise CorruptError unless the tensors, in order, cover the data exactly once."""
    reached = 0
    for spec in specs:
        if spec.begin != reached:
            raise CorruptError(
                f"tensor {spec.name!r} begins at byte {spec.begin} of the data, but the tensors "
                f"before it end at {reached}"
            )
        reached = spec.end
    if reached != data_bytes:
        raise CorruptError(
            f"the tensors need {reached} bytes of data, but the file has {data_bytes}"
        )
