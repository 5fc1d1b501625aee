"""verify() reports every kind of damage to a file, and misses none."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from stores import manifest

from rekindle.checkpoints import block_checksums as blocks
from rekindle.checkpoints import verifying
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.format import plan_layout, write_header
from rekindle.checkpoints.store import Checkpoint, CheckpointFile
from rekindle.checkpoints.verifying import Damage, verify

NAME = "state-0.safetensors"
BLOCK = 64
TENSORS = [("first", "F32", (4, 4)), ("second", "F32", (8,)), ("last", "U8", (5,))]
ENDS = {"first": 64, "second": 96, "last": 101}  # the end of each tensor in the data


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "PIECE", 100)
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)


def committed(store: DirectoryStore) -> tuple[Checkpoint, Path]:
    layout = plan_layout(TENSORS, 2)
    buffer = memoryview(bytearray(range(256)) * 4)[: layout.total_bytes]
    write_header(layout, {}, buffer)
    store.write(manifest(5), {NAME: CheckpointFile([buffer], (0,))})
    found = store.find(5, 1)
    assert found
    return found, found.path / NAME


def look(checkpoint: Checkpoint) -> tuple[tuple[Damage, ...], int]:
    """Return the damages, and the number of bytes read."""
    counts: list[int] = []
    return verify(checkpoint, counts.append), sum(counts)


def test_intact(store: DirectoryStore) -> None:
    """For an intact file, verify() reports no damage and reads every byte once."""
    checkpoint, path = committed(store)
    assert look(checkpoint) == ((), path.stat().st_size)


def test_every_truncation(store: DirectoryStore) -> None:
    """verify() reports each truncation, with the affected tensors if the header is complete."""
    checkpoint, path = committed(store)
    content = path.read_bytes()
    header = len(content) - ENDS["last"]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        ((damage,), read) = look(checkpoint)
        assert (damage.file, damage.what, read) == (NAME, "truncated", length)
        assert damage.where.startswith(f"it ends after {length} of {len(content)} bytes")
        first = [name for name, end in ENDS.items() if length < header + end]
        assert ("header cannot be read" in damage.where) == (length < header)
        if length >= header:
            assert damage.where.endswith(": " + ", ".join(f"tensor {name}" for name in first))


def test_every_flipped_bit(store: DirectoryStore) -> None:
    """verify() reports each flipped bit with its block and exactly the tensors in the block."""
    checkpoint, path = committed(store)
    content = path.read_bytes()
    header = len(content) - ENDS["last"]
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        ((damage,), _) = look(checkpoint)
        assert damage.what == "changed"
        begin, end = at // BLOCK * BLOCK, min(at // BLOCK * BLOCK + BLOCK, len(content))
        assert damage.where.startswith(f"bytes {begin} to {end}: ")
        if at >= header:
            starts = dict(zip(ENDS, (0, *ENDS.values()), strict=False))
            inside = [n for n in ENDS if starts[n] < end - header and begin - header < ENDS[n]]
            assert damage.where.partition(": ")[2] == ", ".join(f"tensor {n}" for n in inside)
    path.write_bytes(b"\xff" * 8 + content[8:])
    assert "the header cannot be read" in look(checkpoint)[0][0].where
    path.write_bytes(bytes(len(content)))
    assert look(checkpoint)[0][0].where.startswith(f"bytes 0 to {len(content)}: ")


def test_blocks_that_the_manifest_does_not_tell(store: DirectoryStore) -> None:
    """For a manifest without block checksums, the file is one block."""
    checkpoint, path = committed(store)
    (entry,) = checkpoint.manifest.files
    old = msgspec.structs.replace(entry, blocks=(), block_bytes=0)
    before = store.at(msgspec.structs.replace(checkpoint.manifest, files=(old,)))
    assert look(before)[0] == ()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    ((damage,), _) = look(before)
    text = "the header, tensor first, tensor second and 1 more of 3 tensors"
    assert damage.where == f"bytes 0 to {len(content)}: {text}"


def test_what_is_no_file_of_its_size(store: DirectoryStore, tmp_path: Path) -> None:
    """verify() distinguishes a longer file, a missing file, a link and a folder."""
    checkpoint, path = committed(store)
    os.truncate(path, path.stat().st_size + 1)
    assert look(checkpoint)[0][0].what == "too long"
    path.rename(tmp_path / "elsewhere")
    assert look(checkpoint)[0][0].what == "missing"
    path.symlink_to(tmp_path / "elsewhere")
    assert look(checkpoint)[0] == (Damage(NAME, "unreadable", f"{NAME} is not a plain file"),)
    path.unlink()
    path.mkdir()
    assert look(checkpoint)[0][0].what == "unreadable"


def test_an_empty_file(store: DirectoryStore) -> None:
    """An empty file is intact, and a missing empty file is missing."""
    store.write(manifest(5), {NAME: CheckpointFile([], (0,))})
    found = store.find(5, 1)
    assert found
    assert verify(found, lambda _: None) == ()
    (found.path / NAME).unlink()
    assert [damage.what for damage in verify(found, lambda _: None)] == ["missing"]
