"""The directory store has a checkpoint completely or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.numpy
from stores import content, manifest, newest_step, put, shard

from rekindle.checkpoints import directory, files
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import CheckpointFile, Written, read_file
from rekindle.errors import CheckpointError, CorruptError


def test_a_checkpoint_is_read_back(store: DirectoryStore, root: Path) -> None:
    """A new store finds a written checkpoint with its manifest and its safetensors files."""
    written = put(store, 7, generation=3)
    assert written == Written(
        str(root / "step-0000000007-g000003"), 2 * len(shard(0)), existed=False
    )
    found = DirectoryStore(root).newest()
    assert found.passed_over == ()
    assert found.checkpoint
    assert found.checkpoint.path == Path(written.location)
    assert [(e.name, e.ranks) for e in found.checkpoint.manifest.files] == [
        ("state-0.safetensors", (0,)),
        ("state-1.safetensors", (1,)),
    ]
    assert found.checkpoint.manifest.data_position == {"seen": 7}
    assert content(found.checkpoint) == {
        "state-0.safetensors": bytes(shard(7)),
        "state-1.safetensors": bytes(shard(8)),
    }
    shard_1 = safetensors.numpy.load_file(Path(written.location, "state-1.safetensors"))
    assert shard_1["w"].tolist() == [8] * 4


def test_chunks_of_any_size_are_joined(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has its chunks in order, for any size of chunks and of system calls."""
    monkeypatch.setattr(files, "_PIECE", 7)
    chunks = [b"", b"abc", memoryview(bytes(range(100)))[3:90], bytearray(b"z" * 14), b""]
    store.write(manifest(1), {"a": CheckpointFile(chunks, (0,)), "empty": CheckpointFile([], (1,))})
    checkpoint = store.newest().checkpoint
    assert checkpoint
    assert content(checkpoint) == {"a": b"".join(map(bytes, chunks)), "empty": b""}


def test_bytes_handed_out_are_private(store: DirectoryStore, root: Path) -> None:
    """If a file shrinks after a read, the returned bytes do not change."""
    path = Path(put(store, 1).location) / "state-0.safetensors"
    checkpoint = store.newest().checkpoint
    assert checkpoint
    data = read_file(checkpoint, "state-0.safetensors")
    os.truncate(path, 0)
    assert data == shard(1)


def test_writing_a_committed_checkpoint_again_changes_nothing(
    store: DirectoryStore, root: Path
) -> None:
    """A second write of a step and generation reports `existed`, and changes no file."""
    first = put(store, 1)
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    again = store.write(manifest(1), {"other": CheckpointFile([b"other"], (0, 1))})
    assert again == Written(first.location, first.bytes, existed=True)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


def test_another_jobs_checkpoint_is_not_taken_for_ones_own(store: DirectoryStore) -> None:
    """The store refuses to write to the directory of another job, and keeps its checkpoint."""
    put(store, 1)
    with pytest.raises(CheckpointError, match=r"of job 'job'.*another location for job 'mine'"):
        store.write(manifest(1, job="mine"), {})
    assert newest_step(store) == 1


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def empty_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 0)


def tear_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 100)


def swap_manifest(path: Path) -> None:
    shutil.copy(path.parent / "step-0000000001-g000001" / "manifest.json", path)


def lose_file(path: Path) -> None:
    (path / "state-0.safetensors").unlink()


def tear_file(path: Path) -> None:
    os.truncate(path / "state-0.safetensors", 100)


def flip_bit(path: Path) -> None:
    with (path / "state-1.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def link_file(path: Path) -> None:
    (path / "state-0.safetensors").rename(path / "elsewhere")
    (path / "state-0.safetensors").symlink_to("elsewhere")


DAMAGES: dict[Callable[[Path], None], str] = {
    lose_manifest: "there is no manifest, because the write did not finish",
    empty_manifest: "the manifest is empty, because the write did not finish",
    tear_manifest: "the file is incomplete",
    swap_manifest: "the manifest belongs to step 1, generation 1",
    lose_file: "state-0.safetensors is missing",
    tear_file: "state-0.safetensors has 100 bytes, the manifest has ",
    flip_bit: "checksum of state-1.safetensors differs: it has xxh3_128:",
    link_file: "state-0.safetensors is not a plain file",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(
    store: DirectoryStore, damage: Callable[[Path], None]
) -> None:
    """newest() returns the next older checkpoint, and the reason why it skipped the newer one."""
    put(store, 1)
    path = Path(put(store, 2).location)
    damage(path)
    found = store.newest()
    assert found.checkpoint
    assert found.checkpoint.manifest.step == 1
    (passed_over,) = found.passed_over
    assert passed_over.location == str(path)
    assert passed_over.reason.startswith(DAMAGES[damage])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_written_over(
    store: DirectoryStore, damage: Callable[[Path], None]
) -> None:
    """A new checkpoint replaces a damaged checkpoint of the same step and generation."""
    put(store, 1)
    path = Path(put(store, 2).location)
    damage(path)
    assert not put(store, 2).existed
    assert newest_step(store) == 2
    assert len(list(path.iterdir())) == 3


def test_a_checkpoint_that_cannot_be_read_is_not_written_over(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary read error is not damage, so the store does not remove anything."""
    put(store, 1)
    put(store, 2)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(directory, "verify_file", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            put(store, 2)
        assert DirectoryStore(store.root).prune(Retention(last=1)) == ()
        assert {p.reason for p in store.newest().passed_over} == {
            "it cannot be read: [Errno 5] Input/output error"
        }
    assert newest_step(store) == 2


def test_every_truncation_and_flipped_bit_is_recognised(store: DirectoryStore) -> None:
    """After the loss of any bit or any tail of a checkpoint, newest() finds the older one."""
    put(store, 1)
    path = Path(store.write(manifest(2), {"a": CheckpointFile([b"state"], (0, 1))}).location)
    for file in list(path.iterdir()):
        data = file.read_bytes()
        cuts = [data[:n] for n in range(len(data))]
        flips = [
            data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :]
            for i in range(len(data))
            for bit in range(8)
        ]
        for damaged in [*cuts, *flips, data + b"\0"]:
            file.write_bytes(damaged)
            assert newest_step(store) == 1
        file.write_bytes(data)
        assert newest_step(store) == 2


def test_the_newest_is_the_highest_step_then_generation(store: DirectoryStore) -> None:
    """newest() orders checkpoints by step, then by generation; at_most limits the step."""
    for step, generation in [(9, 4), (10, 2), (10, 3), (11, 1)]:
        put(store, step, generation)
    names = [
        found.path.name
        for limit in (None, 10, 9, 8)
        if (found := store.newest(at_most=limit).checkpoint)
    ]
    assert names == [
        "step-0000000011-g000001",
        "step-0000000010-g000003",
        "step-0000000009-g000004",
    ]


def test_nothing_is_found_where_nothing_is(store: DirectoryStore, root: Path) -> None:
    """A missing or empty root has no checkpoint; newest() and prune() do not create the root."""
    assert store.newest() == directory.NewestCheckpoint(None, ())
    assert store.prune(Retention(last=1)) == ()
    assert not root.exists()
    root.mkdir()
    assert store.newest() == directory.NewestCheckpoint(None, ())


def test_foreign_files_are_left_alone(store: DirectoryStore, root: Path, tmp_path: Path) -> None:
    """The store does not read or remove a file without the exact name of a checkpoint."""
    outside = Path(put(DirectoryStore(tmp_path / "outside"), 99).location)
    put(store, 1)
    for name in ("step-5", "step-0000000005", "step-0000000005-g000001.old", "xstep-1-g1"):
        (root / name).mkdir()
    (root / "step-00000000005-g000001").mkdir()
    (root / "step-0000000007-g000001").write_text("a file")
    (root / "step-0000000099-g000001").symlink_to(outside)
    (root / "notes.txt").write_text("notes")
    before = sorted(p.name for p in root.iterdir())
    found = store.newest()
    assert found.checkpoint
    assert found.checkpoint.manifest.step == 1
    assert found.passed_over == ()
    assert store.prune(Retention(last=1)) == ()
    assert sorted(p.name for p in root.iterdir()) == before


def test_pruning_while_reading_is_met_by_looking_again(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process prunes during the search, the reader finds the newer checkpoint."""
    put(store, 1)
    other, genuine = DirectoryStore(store.root), files.verify_file

    def prune_then_verify(*arguments: object) -> None:
        monkeypatch.setattr(directory, "verify_file", genuine)
        put(other, 2)
        other.prune(Retention(last=1))
        genuine(*arguments)

    monkeypatch.setattr(directory, "verify_file", prune_then_verify)
    assert newest_step(store) == 2


def test_damage_after_the_search_is_recognised(store: DirectoryStore) -> None:
    """read_file() verifies the file again, and accepts only files of the manifest."""
    path = Path(put(store, 1).location)
    checkpoint = store.newest().checkpoint
    assert checkpoint
    with pytest.raises(CheckpointError, match=r"no file 'manifest.json'; it has: state-0"):
        read_file(checkpoint, "manifest.json")
    flip_bit(path)
    tear_file(path)
    with pytest.raises(CorruptError, match=r"checksum of state-1\.safetensors differs"):
        read_file(checkpoint, "state-1.safetensors")
    with pytest.raises(CorruptError, match=r"has 100 bytes"):
        read_file(checkpoint, "state-0.safetensors")
    shutil.rmtree(path)
    with pytest.raises(CorruptError, match="is missing"):
        read_file(checkpoint, "state-0.safetensors")


def test_prune_keeps_the_newest_valid_ones(store: DirectoryStore) -> None:
    """prune() counts only valid checkpoints, and keeps damaged ones that are newer than the last.

    It also removes unfinished checkpoints.
    """
    paths = {step: Path(put(store, step).location) for step in range(1, 7)}
    flip_bit(paths[6])
    flip_bit(paths[4])
    lose_manifest(paths[3])
    assert store.prune(Retention(last=2)) == ((1, 1),)
    assert [step for step, path in paths.items() if path.exists()] == [2, 4, 5, 6]
    assert store.prune(Retention(last=1)) == ((4, 1), (2, 1))
    assert newest_step(store) == 5


def test_prune_never_removes_the_last_valid_one(store: DirectoryStore) -> None:
    """If too few checkpoints are valid, prune() removes none."""
    paths = [Path(put(store, step).location) for step in (1, 2, 3)]
    flip_bit(paths[1])
    flip_bit(paths[2])
    assert store.prune(Retention(last=1)) == ()
    assert store.prune(Retention(last=9)) == ()
    assert all(path.exists() for path in paths)


def test_prune_reads_only_what_it_does_not_know(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prune() reads only checkpoints that this process did not write."""
    read: list[Path] = []
    monkeypatch.setattr(directory, "verify_file", lambda path, entry: read.append(path))
    for step in (1, 2, 3):
        put(store, step)
    assert store.prune(Retention(last=2)) == ((1, 1),)
    assert read == []
    assert DirectoryStore(store.root).prune(Retention(last=2)) == ()
    assert len(read) == 4


def test_a_half_pruned_checkpoint_does_not_count(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a removal fails, prune() has removed the manifest already, and raises an error."""
    old, new = Path(put(store, 1).location), Path(put(store, 2).location)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        with pytest.raises(CheckpointError, match=r"cannot prune .*check the disk"):
            store.prune(Retention(last=1))
    lose_manifest(new)
    assert [Path(item.location) for item in store.newest().passed_over] == [new, old]
