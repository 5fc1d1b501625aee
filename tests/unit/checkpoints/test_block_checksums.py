"""Parts of a file: read without the rest of the file, in verified blocks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest
from stores import manifest, shard

from rekindle.checkpoints import block_checksums as blocks
from rekindle.checkpoints import resharding
from rekindle.checkpoints.block_checksums import summed
from rekindle.checkpoints.directory import DirectoryCheckpoint, DirectoryStore
from rekindle.checkpoints.format import read_header
from rekindle.checkpoints.manifest import FileEntry, decode, encode
from rekindle.checkpoints.resharding import Excerpts
from rekindle.checkpoints.store import CheckpointFile
from rekindle.errors import CheckpointError, CorruptError

BLOCK = 64
DATA = random.Random(1).randbytes(1000)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the block size, so that small files have several blocks."""
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)


@pytest.fixture
def checkpoint(store: DirectoryStore) -> DirectoryCheckpoint:
    store.write(manifest(1), {"a": CheckpointFile([DATA[:10], DATA[10:500], DATA[500:]], (0,))})
    found = store.find(1, 1)
    assert found
    return found


class Watched:
    """A checkpoint that records the ranges of each read."""

    def __init__(self, checkpoint: DirectoryCheckpoint) -> None:
        self.location, self.manifest = checkpoint.location, checkpoint.manifest
        self.ranges: list[tuple[int, int]] = []
        self._of = checkpoint

    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        self.ranges.append((begin, begin + len(into)))
        self._of.read_into(name, begin, into)


def entry_of(found: DirectoryCheckpoint) -> FileEntry:
    [entry] = found.manifest.files
    return entry


def test_checksums_do_not_depend_on_the_cuts() -> None:
    """The checksums of a file and its blocks do not depend on the chunks.

    The last block may be shorter.
    """
    whole = summed([DATA])
    assert whole == summed(DATA[at : at + 7] for at in range(0, len(DATA), 7))
    assert len(whole.blocks) == 16  # 15.6, rounded up
    assert summed([]).blocks == ()


@pytest.mark.parametrize(("begin", "end"), [(0, 1000), (0, 0), (999, 1000), (64, 128), (63, 193)])
def test_any_bytes_of_a_file(checkpoint: DirectoryCheckpoint, begin: int, end: int) -> None:
    """read_into() returns any range of a file, also parts of blocks."""
    into = bytearray(end - begin)
    checkpoint.read_into("a", begin, memoryview(into))
    assert into == DATA[begin:end]


def test_bytes_that_the_file_has_not(checkpoint: DirectoryCheckpoint) -> None:
    """A range beyond the end of the file is a mistake of the caller, not damage."""
    with pytest.raises(CheckpointError, match="so it does not have 2 bytes at byte 999"):
        checkpoint.read_into("a", 999, memoryview(bytearray(2)))


def test_a_damaged_byte_is_not_read(checkpoint: DirectoryCheckpoint) -> None:
    """Any read of a damaged block fails; reads of other blocks succeed."""
    path = checkpoint.path / "a"
    for at in range(0, 1000, 37):
        spoiled = bytearray(DATA)
        spoiled[at] ^= 1
        path.write_bytes(spoiled)
        first = at - at % BLOCK
        for begin in (first, min(first + BLOCK, 1000) - 1, at):
            with pytest.raises(CorruptError, match=f"checksum of a differs: its bytes {first} to"):
                checkpoint.read_into("a", begin, memoryview(bytearray(1)))
        if first:
            into = bytearray(first)
            checkpoint.read_into("a", 0, memoryview(into))
            assert into == DATA[:first]
    path.write_bytes(DATA[:-1])
    with pytest.raises(CorruptError, match="999 bytes"):
        checkpoint.read_into("a", 0, memoryview(bytearray(1)))
    path.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.read_into("a", 0, memoryview(bytearray(1)))


def test_a_file_without_blocks(checkpoint: DirectoryCheckpoint) -> None:
    """A file without block checksums is read completely, and its one checksum is verified."""
    old = msgspec.structs.replace(entry_of(checkpoint), block_bytes=0, blocks=())
    older = DirectoryCheckpoint(
        checkpoint.path, msgspec.structs.replace(checkpoint.manifest, files=(old,))
    )
    assert decode(encode(older.manifest)) == older.manifest
    into = bytearray(10)
    older.read_into("a", 70, memoryview(into))
    assert into == DATA[70:80]
    (checkpoint.path / "a").write_bytes(DATA[:-1] + b"!")
    with pytest.raises(CorruptError, match="checksum of a differs"):
        older.read_into("a", 70, memoryview(into))


@pytest.mark.parametrize("blocks", [("0" * 16,) * 15, ("0" * 16,) * 17])
def test_a_manifest_with_another_number_of_blocks(
    checkpoint: DirectoryCheckpoint, blocks: tuple[str, ...]
) -> None:
    """encode() refuses a manifest with a wrong number of blocks."""
    wrong = msgspec.structs.replace(entry_of(checkpoint), blocks=blocks)
    with pytest.raises(CheckpointError, match="manifest does not list all blocks of 'a'"):
        encode(msgspec.structs.replace(checkpoint.manifest, files=(wrong,)))


def test_blocks_are_read_once(
    checkpoint: DirectoryCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges in order share blocks, also across windows, and other blocks are not read."""
    monkeypatch.setattr(resharding, "WINDOW_BYTES", 3 * BLOCK)
    watched = Watched(checkpoint)
    source = Excerpts(watched, entry_of(checkpoint))
    ranges = [(0, 3), (3, 100), (90, 210), (210, 300), (640, 650), (990, 1000)]
    read = [bytes(each) for each in source.read(ranges)]
    assert read == [DATA[begin:end] for begin, end in ranges]
    assert watched.ranges == [(0, 128), (128, 256), (256, 320), (640, 704), (960, 1000)]


def test_random_ranges_in_order(checkpoint: DirectoryCheckpoint) -> None:
    """The ranges may overlap or be empty."""
    draw = random.Random(2)
    for _ in range(50):
        ranges = sorted(tuple(sorted(draw.choices(range(1001), k=2))) for _ in range(6))
        source = Excerpts(checkpoint, entry_of(checkpoint))
        assert [bytes(each) for each in source.read(ranges)] == [DATA[a:b] for a, b in ranges]


def test_memory_is_filled_straight(checkpoint: DirectoryCheckpoint) -> None:
    """fill() reads complete blocks directly; shared blocks go through the window, once each."""
    watched = Watched(checkpoint)
    source = Excerpts(watched, entry_of(checkpoint))
    cuts = [0, 30, 200, 330, 384, 384, 390, 396, 1000]
    for begin, end in itertools.pairwise(cuts):
        into = bytearray(end - begin)
        source.fill(begin, memoryview(into))
        assert into == DATA[begin:end], (begin, end)
    ranges = [(0, 64), (64, 192), (192, 256), (256, 320), (320, 384), (384, 448), (448, 1000)]
    assert watched.ranges == ranges


def test_the_header_alone(store: DirectoryStore, root: Path) -> None:
    """header() agrees with read_header() of the complete file, and ignores damage after it."""
    store.write(manifest(1), {"a": CheckpointFile([shard(5)], (0,))})
    found = store.find(1, 1)
    assert found
    assert Excerpts(found, entry_of(found)).header() == read_header(shard(5))
    data = bytearray(shard(5))
    data[-1] ^= 1
    (found.path / "a").write_bytes(data)
    assert Excerpts(found, entry_of(found)).header() == read_header(shard(5))


@pytest.mark.parametrize(
    ("data", "text"), [(b"1234", "4 bytes cannot hold"), (b"\xff" * 20, "the header length is")]
)
def test_no_safetensors_file(store: DirectoryStore, data: bytes, text: str) -> None:
    """header() refuses an intact file that is not a safetensors file."""
    store.write(manifest(1), {"a": CheckpointFile([data], (0,))})
    found = store.find(1, 1)
    assert found
    with pytest.raises(CorruptError, match=text):
        Excerpts(found, entry_of(found)).header()
