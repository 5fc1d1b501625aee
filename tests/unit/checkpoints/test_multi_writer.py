"""Parts and their commit: only all parts together make a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from stores import content, manifest, newest_step, put, put_parts, tree, with_files, write_parts

from rekindle.checkpoints import directory
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import CheckpointFile, Written, read_file
from rekindle.errors import CheckpointError, CorruptError


def lose(path: Path) -> None:
    path.unlink()


def lose_all(path: Path) -> None:
    shutil.rmtree(path.parent)


def tear(path: Path) -> None:
    os.truncate(path, 100)


def lengthen(path: Path) -> None:
    os.truncate(path, 300)


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


DAMAGES: dict[Callable[[Path], None], str] = {
    lose: "state-1 is missing",
    lose_all: "state-0 is missing",
    tear: "state-1 has 100 bytes, the manifest has 200",
    lengthen: "state-1 has 300 bytes, the manifest has 200",
    link: "state-1 is not a plain file",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_are_not_whole_are_not_committed(
    store: DirectoryStore, root: Path, damage: Callable[[Path], None]
) -> None:
    """commit() names an incomplete part, removes nothing, and succeeds after a new write."""
    files = write_parts(store, 2)
    damage(root / "step-0000000002-g000001" / "state-1")
    before = tree(root)
    with pytest.raises(CheckpointError, match=rf"cannot commit .*-g000001: {DAMAGES[damage]}"):
        store.commit(with_files(2, files))
    assert tree(root) == before
    assert store.find(2, 1) is None
    assert not put_parts(store, 2).existed
    assert newest_step(store) == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_committed_part_that_is_not_whole_is_not_found(
    store: DirectoryStore, root: Path, damage: Callable[[Path], None]
) -> None:
    """find() checks names and sizes, and write_part() replaces an incomplete part."""
    path = Path(put_parts(store, 2).location)
    damage(path / "state-1")
    assert store.find(2, 1) is None
    assert not put_parts(store, 2).existed
    found = store.find(2, 1)
    assert found
    assert content(found)["state-1"][:3] == bytes([2, 1, 1])


@pytest.mark.parametrize("size", [0, 100])
def test_a_manifest_that_a_killed_process_left_torn_is_written_again(
    store: DirectoryStore, size: int
) -> None:
    """commit() replaces an incomplete manifest without a new write of the parts."""
    files = write_parts(store, 2)
    path = Path(store.commit(with_files(2, files)).location)
    os.truncate(path / "manifest.json", size)
    assert store.find(2, 1) is None
    assert not store.commit(with_files(2, files)).existed
    assert newest_step(store) == 2


def test_a_checkpoint_without_parts_is_refused(store: DirectoryStore, root: Path) -> None:
    """commit() refuses a manifest without files, so an empty checkpoint cannot be the newest."""
    write_parts(store, 1)
    with pytest.raises(CheckpointError, match="does not list a file"):
        store.commit(manifest(1))
    assert newest_step(store) is None


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def tear_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 100)


def swap_manifest(path: Path) -> None:
    shutil.copy(path.parent / "step-0000000004-g000001" / "manifest.json", path)


def lose_part(path: Path) -> None:
    (path / "state-0").unlink()


@pytest.mark.parametrize("damage", [lose_manifest, tear_manifest, swap_manifest, lose_part])
def test_the_checkpoint_of_a_step_and_generation_is_found(
    store: DirectoryStore, root: Path, damage: Callable[[Path], None]
) -> None:
    """find() returns exactly this generation, because another one computed the step differently."""
    paths = [Path(put_parts(store, 4, generation).location) for generation in (1, 2)]
    put_parts(store, 5)
    write_parts(store, 4, generation=3)
    for generation, path in enumerate(paths, start=1):
        found = store.find(4, generation)
        assert found
        assert found.path == path
        assert read_file(found, "state-1")[:3] == bytes([4, generation, 1])
    damage(paths[1])
    assert store.find(4, 2) is None
    assert store.find(4, 3) is None
    assert store.find(3, 1) is None
    assert store.find(4, 1)


def test_what_there_is_by_step_and_generation(store: DirectoryStore) -> None:
    """keys() lists finished checkpoints up to a limit, newest first."""
    assert store.keys() == []
    for step, generation in ((4, 1), (5, 1), (4, 2)):
        put_parts(store, step, generation)
    write_parts(store, 6)
    assert store.keys() == [(5, 1), (4, 2), (4, 1)]
    assert store.keys(at_most=(4, 2)) == [(4, 2), (4, 1)]
    assert store.keys(at_most=(4, 1)) == [(4, 1)]


def test_each_part_is_verified_by_whoever_reads_it(store: DirectoryStore) -> None:
    """find() does not read parts; only a read of the damaged part reports a flipped bit."""
    path = Path(put_parts(store, 1).location)
    (path / "state-1").write_bytes(bytes([1, 1, 1]).ljust(200, b","))
    found = store.find(1, 1)
    assert found
    assert read_file(found, "state-0")[:3] == bytes([1, 1, 0])
    with pytest.raises(CorruptError, match="checksum of state-1 differs"):
        read_file(found, "state-1")
    with pytest.raises(CheckpointError, match="has no file 'state-2'; it has: state-0, state-1"):
        read_file(found, "state-2")


def test_a_committed_checkpoint_is_left_as_it_is(store: DirectoryStore, root: Path) -> None:
    """A second write or commit returns the existing checkpoint, and changes no file."""
    files = write_parts(store, 1)
    first = store.commit(with_files(1, files))
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    other = DirectoryStore(root)
    assert other.write_part(1, 1, "state-1", CheckpointFile([b"other"], (9,))) == files[1]
    assert other.commit(with_files(1, files[:1])) == Written(first.location, 400, existed=True)
    assert put(other, 1).existed
    with pytest.raises(CheckpointError, match="has no file 'state-2'; it has: state-0, state-1"):
        other.write_part(1, 1, "state-2", CheckpointFile([b"other"], (9,)))
    foreign = msgspec.structs.replace(with_files(1, files), job_id="mine")
    with pytest.raises(CheckpointError, match=r"of job 'job'.*another location for job 'mine'"):
        other.commit(foreign)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


def test_a_committed_part_with_a_flipped_bit_is_written_over(
    store: DirectoryStore, root: Path
) -> None:
    """While a damaged part is written again, the checkpoint does not count.

    The other parts stay.
    """
    files = write_parts(store, 1)
    path = Path(store.commit(with_files(1, files)).location)
    (path / "state-1").write_bytes(b"," * 200)
    untouched = (path / "state-0").stat()
    assert store.write_part(1, 1, "state-0", CheckpointFile([b"other"], (0,))) == files[0]
    again = store.write_part(1, 1, "state-1", CheckpointFile([b"again"], (1,)))
    assert store.find(1, 1) is None
    assert (path / "state-0").stat().st_ctime_ns == untouched.st_ctime_ns
    assert not store.commit(with_files(1, (files[0], again))).existed
    assert newest_step(store) == 1


def test_a_damaged_newer_checkpoint_does_not_outdate_a_later_generation(
    store: DirectoryStore, root: Path
) -> None:
    """A damaged newer checkpoint does not stop a later generation from lower steps."""
    damaged = Path(put_parts(store, 9).location)
    tear_manifest(damaged)
    files = write_parts(store, 7, generation=2)
    put_parts(store, 6, generation=2)
    store.prune(Retention(last=1))
    assert not store.commit(with_files(7, files, generation=2)).existed
    assert newest_step(store) == 7


def test_pruning_does_not_read_what_was_committed_here(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prune() does not read the parts that this process committed."""
    read: list[Path] = []
    monkeypatch.setattr(directory, "verify_file", lambda path, entry: read.append(path))
    for step in (1, 2, 3):
        put_parts(store, step)
    assert store.prune(Retention(last=2)) == ((1, 1),)
    assert read == []


NAMES = ["../a", "a/b", "/a", "..", ".", "", ".lock", "manifest.json", "-a", "a\n", "a\0", "\ud800"]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_is_refused_before_anything_is_made(
    store: DirectoryStore, root: Path, name: str
) -> None:
    """write_part() refuses a name that a manifest must not have, and creates no directory."""
    with pytest.raises(CheckpointError, match="the manifest"):
        store.write_part(1, 1, name, CheckpointFile([b"x"], (0,)))
    assert not root.exists()


@pytest.mark.parametrize(("step", "generation", "rank"), [(-1, 1, 0), (1, -1, 0), (1, 1, -1)])
def test_impossible_numbers_are_refused_before_anything_is_made(
    store: DirectoryStore, root: Path, step: int, generation: int, rank: int
) -> None:
    """write_part() refuses numbers that no manifest can have, and creates no directory."""
    with pytest.raises(CheckpointError, match="cannot write the manifest"):
        store.write_part(step, generation, "state", CheckpointFile([b"x"], (rank,)))
    assert not root.exists()


def test_what_stands_in_the_way_is_named(store: DirectoryStore, root: Path) -> None:
    """If something else is at the path of a root, a checkpoint or a part, the error names it."""
    path = root / "step-0000000001-g000001"
    (path / "state-0").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"cannot write .*state-0: "):
        write_parts(store, 1)
    assert (path / "state-0").is_dir()
    (root / "step-0000000002-g000001").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot write .*-g000001/state-0: "):
        write_parts(store, 2)
    with pytest.raises(CheckpointError, match=r"cannot write .*; move the existing file"):
        write_parts(DirectoryStore(root / "step-0000000002-g000001"), 1)
    with pytest.raises(CheckpointError, match=r"cannot read .*; choose a directory"):
        DirectoryStore(root / "step-0000000002-g000001").find(1, 1)
