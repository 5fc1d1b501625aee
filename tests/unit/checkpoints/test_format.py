"""The file layout follows the safetensors format exactly, and the reader refuses invalid files."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from stores import json_values, texts

from rekindle.checkpoints.format import (
    DTYPE_BITS,
    FileLayout,
    Header,
    checksum,
    plan_layout,
    read_header,
    write_header,
)
from rekindle.errors import CheckpointError, CorruptError

Tensor = tuple[str, str, tuple[int, ...]]

NUMPY_DTYPES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "C64": "c8", "BOOL": "?",
    "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
    "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1",
}  # fmt: skip

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
whole_bytes = sorted(code for code, bits in DTYPE_BITS.items() if bits % 8 == 0)


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """Return any tensors of the format, including dtypes with a few bits per element."""
    names = draw(st.lists(texts.filter(lambda name: name != "__metadata__"), unique=True))
    found: list[Tensor] = []
    for name in names:
        shape = draw(shapes)
        few_bits = ["F4", "F6_E2M3"] if np.prod(shape) % 4 == 0 else []
        found.append((name, draw(st.sampled_from([*whole_bytes, *few_bits])), shape))
    return found


def fill(layout: FileLayout, metadata: dict[str, str]) -> bytearray:
    """Return a buffer with this header and varying bytes as data."""
    buffer = bytearray(bytes(i * 7 % 251 for i in range(layout.total_bytes)))
    write_header(layout, metadata, memoryview(buffer))
    return buffer


def file_of(header: object, data: bytes = b"") -> bytes:
    """Return a file with this JSON, or these bytes, as its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def library_reads(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Return the tensors that the safetensors library finds in the file."""
    found = safetensors.deserialize(data)
    return {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in found}


def we_read(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Return the tensors that the reader of Rekindle finds in the file."""
    header = read_header(data)
    body = data[header.data_begin :]
    return {s.name: (s.dtype, list(s.shape), body[s.begin : s.end]) for s in header.specs}


@given(tensors(), st.dictionaries(texts, texts, max_size=4))
def test_any_state_is_read_back_by_us_and_by_the_library(
    state: list[Tensor], metadata: dict[str, str]
) -> None:
    """Both readers return names, dtypes, shapes, bytes and metadata of any tensors.

    The tensors include scalars and empty tensors.
    """
    layout = plan_layout(state, metadata_room=2000)
    buffer = bytes(fill(layout, metadata))
    assert read_header(buffer) == Header(metadata, layout.specs, layout.header_bytes)
    assert {(s.name, s.dtype, s.shape) for s in layout.specs} == set(state)
    assert library_reads(buffer) == we_read(buffer)


@given(tensors(), st.integers(0, 300))
def test_data_is_aligned_and_without_gaps(state: list[Tensor], room: int) -> None:
    """Data starts at a cache line and has no gaps or overlaps.

    Each tensor starts at a multiple of its element size.
    """
    layout = plan_layout(state, room)
    assert layout.header_bytes % 64 == 0
    assert [s.begin for s in layout.specs] == [0, *(s.end for s in layout.specs)][:-1]
    assert layout.data_bytes == sum(s.end - s.begin for s in layout.specs)
    for spec in layout.specs:
        assert spec.begin % max(1, DTYPE_BITS[spec.dtype] // 8) == 0


def test_numpy_reads_the_file(tmp_path: Path) -> None:
    """safetensors.numpy loads a written file with every dtype that numpy has."""
    arrays = {
        code: np.arange(6).reshape(2, 3).astype(dtype) for code, dtype in NUMPY_DTYPES.items()
    }
    arrays |= {"scalar": np.array(2.5), "empty": np.zeros((3, 0), "f4")}
    codes = {np.dtype(dtype): code for code, dtype in NUMPY_DTYPES.items()}
    layout = plan_layout([(n, codes[a.dtype], a.shape) for n, a in arrays.items()], 100)
    buffer = fill(layout, {"step": "7"})
    for spec in layout.specs:
        begin = layout.header_bytes + spec.begin
        buffer[begin : layout.header_bytes + spec.end] = arrays[spec.name].tobytes()
    path = tmp_path / "state-0.safetensors"
    path.write_bytes(buffer)
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"step": "7"}


def test_torch_reads_the_file_and_we_read_torchs() -> None:
    """safetensors.torch loads a written file, and Rekindle reads a file of safetensors.torch."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load, save

    state = {
        "weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.float16),
        "step": torch.tensor(41),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0, 5),
    }
    saved = save(state, metadata={"framework": "torch"})
    header = read_header(saved)
    assert header.metadata == {"framework": "torch"}
    layout = plan_layout([(s.name, s.dtype, s.shape) for s in header.specs], 64)
    buffer = fill(layout, {})
    origin = {s.name: saved[header.data_begin :][s.begin : s.end] for s in header.specs}
    for spec in layout.specs:
        begin = layout.header_bytes + spec.begin
        buffer[begin : layout.header_bytes + spec.end] = origin[spec.name]
    loaded = load(bytes(buffer))
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@given(st.dictionaries(texts, texts, max_size=3))
def test_other_metadata_leaves_the_data_where_it_is(metadata: dict[str, str]) -> None:
    """A new header with other metadata does not change or move the data."""
    layout = plan_layout([("w", "F32", (3,)), ("b", "U8", ())], 1000)
    buffer = fill(layout, {"step": "1"})
    before = buffer[layout.header_bytes :]
    write_header(layout, metadata, memoryview(buffer))
    assert buffer[layout.header_bytes :] == before
    assert read_header(buffer).metadata == metadata


@given(st.dictionaries(texts, texts, max_size=3))
def test_metadata_of_the_promised_size_fits(metadata: dict[str, str]) -> None:
    """write_header() accepts metadata whose JSON has exactly the reserved size."""
    layout = plan_layout([("w", "F32", (3,))], len(msgspec.json.encode(metadata)))
    assert read_header(fill(layout, metadata)).metadata == metadata


def test_metadata_that_does_not_fit_is_refused() -> None:
    """write_header() refuses too long metadata with the remedy, and does not write."""
    layout = plan_layout([("w", "F32", (3,))], 10)
    buffer = bytearray(layout.total_bytes)
    with pytest.raises(CheckpointError, match=r"longer than the space.*larger metadata_room"):
        write_header(layout, {"key": "x" * 200}, memoryview(buffer))
    assert not any(buffer)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    """write_header() refuses a buffer that is too small for the tensors."""
    layout = plan_layout([("w", "F32", (3,))], 10)
    with pytest.raises(CheckpointError, match="the layout needs"):
        write_header(layout, {}, memoryview(bytearray(layout.total_bytes - 1)))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([("w", "F31", (1,))], "'w'.*'F31' is unknown; use one of BF16"),
        ([("w", "F32", (-1,))], "'w'.*invalid extent"),
        ([("w", "F32", (2**40, 2**40))], "'w'.*invalid extent"),
        ([("w", "F4", (3,))], "'w'.*do not fill whole bytes"),
        ([("w", "F32", ()), ("w", "F32", ())], "2 tensors have 1 different names"),
        ([("__metadata__", "F32", ())], "__metadata__"),
        ([("\ud800", "F32", ())], "valid text"),
        ([("w" * 100_000_001, "F32", ())], "safetensors allows"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(state: list[Tensor], message: str) -> None:
    """plan_layout() refuses tensors that the format cannot represent, with the reason."""
    with pytest.raises(CheckpointError, match=message):
        plan_layout(state, 0)


def small_file() -> bytes:
    """Return a file with two tensors and metadata."""
    layout = plan_layout([("w", "F32", (2, 2)), ("b", "U8", (3,))], 40)
    return bytes(fill(layout, {"step": "7"}))


def test_every_truncation_is_recognised() -> None:
    """read_header() refuses each truncation of a file, and bytes after its end."""
    data = small_file()
    for cut in [*(data[:n] for n in range(len(data))), data + b"\0"]:
        with pytest.raises(CorruptError):
            read_header(cut)


def test_a_flipped_bit_raises_nothing_but_corrupt_errors() -> None:
    """For a flipped header bit, the reader raises CorruptError or agrees with the library."""
    data = small_file()
    for bit in range(read_header(data).data_begin * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        accepted_means_same(bytes(flipped))


def accepted_means_same(data: bytes) -> None:
    """Assert that the reader raises CorruptError or agrees with the library."""
    try:
        ours = we_read(data)
    except CorruptError:
        return
    assert ours == library_reads(data)


offsets = st.lists(st.integers(-1, 9) | json_values, min_size=1, max_size=3)
entries = st.builds(
    entry,
    st.sampled_from(sorted(DTYPE_BITS)) | json_values,
    st.lists(st.integers(-1, 3) | st.integers(2**62, 2**66), max_size=3) | json_values,
    offsets | json_values,
)


@given(
    st.dictionaries(st.just("__metadata__") | texts, entries | json_values, max_size=3),
    st.binary(max_size=9),
)
def test_a_hostile_header_is_refused_or_harmless(header: dict[str, object], data: bytes) -> None:
    """For JSON with wrong types, sizes or offsets, the reader raises only CorruptError."""
    accepted_means_same(file_of(header, data))


@given(st.binary(max_size=60), st.booleans())
def test_garbage_is_refused(garbage: bytes, framed: bool) -> None:
    """For random bytes, also after a correct length, the reader raises only CorruptError."""
    accepted_means_same(file_of(garbage) if framed else garbage)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes cannot hold"),
        (struct.pack("<Q", 2**63) + b"{}", "the header length is 9223372036854775808 bytes"),
        (struct.pack("<Q", 3) + b"{}", "length is 3 bytes, but the whole file has 10"),
        (file_of(b"[]"), "the header of a safetensors file"),
        (file_of(b'{"w":' + b"[" * 100_000), "the header of a safetensors file"),
        (file_of(b'{"w":\xff}'), "the header of a safetensors file"),
        (file_of({"__metadata__": {"step": 7}}), "Expected `str`"),
        (file_of({"w": entry("U8", [1], [0, 2])}, b"12"), "'w' has bytes 0 to 2, .* need 1"),
        (file_of({"w": entry("U8", [1], [1, 0])}, b"1"), "'w' has bytes 1 to 0"),
        (file_of({"w": entry("U8", [1], [-1, 0])}, b"1"), "'w' begins at byte -1"),
        (file_of({"w": entry("U8", [2**63, 2**63], [0, 1])}, b"1"), "'w'.* invalid extent"),
        (file_of(b'{"w":{"shape":[' + b"9" * 9999 + b"]}}"), "the header of a safetensors file"),
        (file_of({"w": entry("ZZ", [1], [0, 1])}, b"1"), "'ZZ' is unknown"),
        (
            file_of({"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [1, 3])}, b"123"),
            "'b' begins at byte 1 of the data, but the tensors before it end at 2",
        ),
        (
            file_of({"a": entry("U8", [1], [0, 1]), "b": entry("U8", [1], [2, 3])}, b"123"),
            "'b' begins at byte 2 of the data, but the tensors before it end at 1",
        ),
        (file_of({"w": entry("U8", [2], [0, 2])}, b"1"), "2 bytes of data, but the file has 1"),
    ],
)  # fmt: skip
def test_the_error_says_what_is_wrong(data: bytes, message: str) -> None:
    """Each kind of damage to a header has its own message."""
    with pytest.raises(CorruptError, match=message):
        read_header(data)


def test_the_buffer_is_free_after_an_error() -> None:
    """After an error no view of the buffer exists, so the handler can close its memory."""
    buffer = bytearray(small_file()[:-1])
    with pytest.raises(CorruptError) as caught:
        read_header(buffer)
    buffer.clear()  # raises BufferError while a view exists
    assert caught.value.__traceback__


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_checksum_does_not_depend_on_the_chunks(data: bytes, cuts: list[int]) -> None:
    """Equal bytes have equal checksums, for any chunks."""
    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    whole = checksum([data])
    assert checksum(map(memoryview, pieces)) == whole
    assert whole.startswith("xxh3_128:")
    assert len(whole) == len("xxh3_128:") + 32


def test_checksum_is_the_published_algorithm() -> None:
    """The checksum of no bytes is the published constant of XXH3 for 128 bits and seed 0."""
    assert checksum([]) == "xxh3_128:99aa06d3014798d86001c324468d497f"
