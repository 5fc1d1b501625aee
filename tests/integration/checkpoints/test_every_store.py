"""Behaviour of each kind of store: a directory, rclone's server, moto's server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from stores import (
    child,
    content,
    manifest,
    newest_step,
    put,
    put_parts,
    shard,
    with_files,
    write_parts,
)
from stores.places import DirectoryPlace, Place

from rekindle.checkpoints import block_checksums as blocks
from rekindle.checkpoints.format import checksum
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.publishing import publish
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import CheckpointFile, read_file
from rekindle.errors import CheckpointError, NewerFormatError


def test_a_checkpoint_is_read_back(place: Place) -> None:
    """Each process that opens the store finds the checkpoint, with its manifest and its bytes."""
    store = place.open()
    assert store.location == place.location
    assert open_store(store.location).location == store.location
    assert store.newest().checkpoint is None
    written = put(store, 7, generation=3)
    assert (written.bytes, written.existed) == (2 * len(shard(0)), False)
    found = place.open().newest()
    assert found.checkpoint
    assert (found.passed_over, found.checkpoint.location) == ((), written.location)
    assert found.checkpoint.manifest.data_position == {"seen": 7}
    assert [(e.name, e.ranks) for e in found.checkpoint.manifest.files] == [
        ("state-0.safetensors", (0,)),
        ("state-1.safetensors", (1,)),
    ]
    assert content(found.checkpoint) == {
        "state-0.safetensors": bytes(shard(7)),
        "state-1.safetensors": bytes(shard(8)),
    }
    names = place.files(7, 3)
    assert names[0].endswith("/manifest.json")
    assert all(name.endswith(".safetensors") for name in names[1:])


def test_any_bytes_of_a_file_can_be_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of any range returns verified bytes, within a block, across blocks or empty.

    A range outside the file is an error.
    """
    monkeypatch.setattr(blocks, "BLOCK", 10)
    data = bytes(range(35))
    parts = {"a": CheckpointFile([data[:3], data[3:]], (0,)), "empty": CheckpointFile([], (1,))}
    place.open().write(manifest(1), parts)
    checkpoint = place.open().find(1, 1)
    assert checkpoint
    assert [len(entry.blocks) for entry in checkpoint.manifest.files] == [4, 0]
    for begin, end in [(0, 35), (0, 10), (9, 11), (10, 20), (13, 17), (5, 35), (34, 35), (20, 20)]:
        view = memoryview(bytearray(end - begin))
        checkpoint.read_into("a", begin, view)
        assert view == data[begin:end]
    checkpoint.read_into("empty", 0, memoryview(b""))
    for begin, count in [(30, 6), (-1, 2), (36, 0)]:
        with pytest.raises(CheckpointError, match="a has 35 bytes"):
            checkpoint.read_into("a", begin, memoryview(bytearray(count)))
    with pytest.raises(CheckpointError, match="has no file 'b'; it has: a, empty"):
        read_file(checkpoint, "b")


def test_damage_is_found_by_those_who_read_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit is an error for each read of its block, and for no other read."""
    monkeypatch.setattr(blocks, "BLOCK", 10)
    place.open().write(manifest(1), {"a": CheckpointFile([bytes(35)], (0,))})
    name = place.files(1)[1]
    place.put(name, bytes(25) + b"\1" + bytes(9))
    checkpoint = place.open().find(1, 1)
    assert checkpoint
    checkpoint.read_into("a", 0, memoryview(bytearray(20)))
    checkpoint.read_into("a", 30, memoryview(bytearray(5)))
    for begin, count in [(19, 2), (20, 1), (0, 35)]:
        with pytest.raises(CheckpointError, match="checksum of a differs: its bytes 20 to 30"):
            checkpoint.read_into("a", begin, memoryview(bytearray(count)))


def test_writing_again_changes_nothing(place: Place) -> None:
    """A second write of a step changes nothing and returns `existed`.

    A write of another job into the same store is an error.
    """
    store = place.open()
    first = put(store, 1)
    before = place.tree()
    again = store.write(manifest(1), {"other": CheckpointFile([b"other"], (0, 1))})
    assert (again.location, again.bytes, again.existed) == (first.location, first.bytes, True)
    assert place.tree() == before
    with pytest.raises(CheckpointError, match=r"of job 'job'.*another location for job 'mine'"):
        store.write(manifest(1, job="mine"), {"a": CheckpointFile([b"a"], (0,))})
    assert place.tree() == before


def test_parts_count_once_they_are_committed(place: Place) -> None:
    """A commit makes a checkpoint of parts; a second commit or write of a part has no effect."""
    store = place.open()
    put(store, 1)
    files = write_parts(store, 2)
    assert newest_step(store) == 1
    assert store.find(2, 1) is None
    assert place.open().commit(with_files(2, files)).existed is False
    assert newest_step(store) == 2
    assert put_parts(place.open(), 2).existed is True
    other = store.write_part(2, 1, "state-0", CheckpointFile([b"another attempt's"], (0,)))
    assert other.checksum == files[0].checksum
    with pytest.raises(CheckpointError, match="has no file 'state-9'"):
        store.write_part(2, 1, "state-9", CheckpointFile([b"x"], (9,)))
    assert store.keys() == [(2, 1), (1, 1)]


def test_a_commit_without_all_parts_is_refused(place: Place) -> None:
    """The error of a commit names a missing part or one of another size; all others remain."""
    store = place.open()
    files = write_parts(store, 2)
    before = place.tree()
    lost = msgspec.structs.replace(files[0], name="lost", stored="")
    with pytest.raises(CheckpointError, match=r"cannot commit .*lost is missing"):
        store.commit(with_files(2, (*files, lost)))
    short = msgspec.structs.replace(files[1], bytes=199, blocks=())
    with pytest.raises(CheckpointError, match="has 200 bytes, the manifest has 199"):
        store.commit(with_files(2, (files[0], short)))
    with pytest.raises(CheckpointError, match="the manifest does not list a file"):
        store.commit(with_files(2, ()))
    assert place.tree() == before
    assert store.commit(with_files(2, files)).existed is False


def test_a_commit_that_comes_too_late_is_refused(place: Place) -> None:
    """A newer checkpoint removes uncommitted parts of older steps; their commit then fails."""
    store = place.open()
    files = write_parts(store, 1)
    put(place.open(), 2)
    with pytest.raises(CheckpointError, match=r"cannot commit .*state-0 is missing"):
        store.commit(with_files(1, files))
    assert store.keys() == [(2, 1)]
    assert len(place.names()) == 3


def lose(place: Place, name: str) -> None:
    place.delete(name)


def cut(place: Place, name: str) -> None:
    place.put(name, place.get(name)[:-1])


def empty(place: Place, name: str) -> None:
    place.put(name, b"")


def flip(place: Place, name: str) -> None:
    data = place.get(name)
    place.put(name, data[:-40] + bytes([data[-40] ^ 4]) + data[-39:])


def swap(place: Place, name: str) -> None:
    place.put(name, place.get(place.files(1)[0]))


def renew(place: Place, name: str) -> None:
    """Rewrite a manifest in the format of a later version of Rekindle."""
    text = json.dumps({**json.loads(place.get(name))["manifest"], "format": 9}).encode()
    place.put(name, b'{"checksum":"%s","manifest":%s}' % (checksum([text]).encode(), text))


MANIFEST: dict[Callable[[Place, str], None], str] = {
    lose: "there is no manifest, because the write did not finish",
    empty: "the manifest is empty, because the write did not finish",
    cut: "the file is incomplete or is not a manifest",
    flip: "the manifest's text has checksum",
    swap: "the manifest belongs to step 1, generation 1",
}
FILES: dict[Callable[[Place, str], None], str] = {
    lose: "{name} is missing",
    empty: "{name} has 0 bytes, the manifest has 132",
    cut: "{name} has 131 bytes, the manifest has 132",
    flip: "checksum of {name} differs",
}


@pytest.mark.parametrize(
    ("index", "damage"), [*((0, d) for d in MANIFEST), *((i, d) for i in (1, 2) for d in FILES)]
)
def test_what_is_damaged_is_passed_over_and_can_be_written_again(
    place: Place, index: int, damage: Callable[[Place, str], None]
) -> None:
    """A damaged checkpoint is skipped with a reason, and the older one is used.

    This holds for each file and each damage. A new write of the step repairs it.
    """
    store = place.open()
    put(store, 1)
    location = put(store, 2).location
    damage(place, place.files(2)[index])
    name = f"state-{index - 1}.safetensors"
    why = MANIFEST[damage] if index == 0 else FILES[damage].format(name=name)
    for reader in (store, place.open()):
        found = reader.newest()
        assert found.checkpoint
        assert found.checkpoint.manifest.step == 1
        (passed_over,) = found.passed_over
        assert passed_over.location == location
        assert passed_over.reason.startswith(why)
    put(place.open(), 2)
    found = place.open().newest()
    assert found.checkpoint
    assert (found.checkpoint.manifest.step, found.passed_over) == (2, ())
    assert content(found.checkpoint)["state-1.safetensors"] == bytes(shard(3))


def test_what_a_later_version_wrote_is_left_alone(place: Place) -> None:
    """A manifest in a newer format is skipped.

    This version does not overwrite, commit or prune that checkpoint.
    """
    store = place.open()
    put(store, 1)
    put(store, 2)
    renew(place, place.files(2)[0])
    before = {name: place.get(name) for name in place.files(2)}
    for reader in (store, place.open()):
        found = reader.newest()
        assert found.checkpoint
        assert found.checkpoint.manifest.step == 1
        assert "has format 9, but this version of Rekindle reads 1" in found.passed_over[0].reason
        for write in (put, put_parts):
            with pytest.raises(NewerFormatError, match="use the version that wrote it"):
                write(reader, 2)
    put(store, 3)
    put(store, 4)
    assert store.prune(Retention(last=4, hours=1)) == ()
    assert [each.newer for each in store.survey()] == [False, False, True, False]
    assert store.prune(Retention(last=1)) == ((3, 1), (1, 1))
    assert {name: place.get(name) for name in place.files(2)} == before


def test_pruning_keeps_valid_ones_and_leaves_nothing_else(place: Place) -> None:
    """A prune keeps the newest valid checkpoints and newer damaged or unfinished ones.

    It removes older checkpoints and unfinished writes.
    """
    store = place.open()
    for step in range(1, 7):
        put(store, step)
        place.put(f"step-{step:010d}-g000000/left", b"over")
    place.put("step-0000000009-g000001/state-0", b"under way")
    flip(place, place.files(6)[1])
    kept = [name for step in (4, 5, 6, 9) for name in place.files(step)]
    assert len(place.open().prune(Retention(last=2))) == 3
    assert place.names() == sorted(kept)
    assert place.open().prune(Retention(last=2)) == place.open().prune(Retention(last=9)) == ()
    assert place.unfinished_uploads() == []


def test_the_newest_is_found_among_steps_and_generations(place: Place) -> None:
    """Keys are sorted by step, then by generation, in descending order, up to a given limit."""
    store = place.open()
    for step, generation in [(3, 1), (12, 1), (3, 2), (200, 1)]:
        put(store, step, generation)
    place.put("step-3/manifest.json", b"of something else")
    assert store.keys() == [(200, 1), (12, 1), (3, 2), (3, 1)]
    assert store.keys(at_most=(3, 2)) == [(3, 2), (3, 1)]
    found = store.newest(at_most=11).checkpoint
    assert found
    assert (found.manifest.step, found.manifest.generation) == (3, 2)
    assert store.newest(at_most=2).checkpoint is None


def test_a_copy_of_the_files_is_a_store_and_can_be_published(place: Place, tmp_path: Path) -> None:
    """A directory with a copy of a store's files is a store; published files have plain names."""
    store = place.open()
    put(store, 1)
    copy = DirectoryPlace(tmp_path / "copy")
    for name, data in place.tree().items():
        copy.put(name, data)
    for checkpoint in (store.newest().checkpoint, copy.open().newest().checkpoint):
        assert checkpoint
        published = publish(checkpoint, str(tmp_path / "published"))
        assert content(checkpoint) == content_of(Path(published.location))
    assert published.existed


def content_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("state-*")}


RACE = """
byte, steps = map(int, sys.argv[2:])
print("ready", flush=True)
for step in range(steps):
    sys.stdin.readline()
    print(store.write(manifest(step), parts(byte, 30_000)).existed, flush=True)
"""


@pytest.mark.parametrize("contents", [(1, 2), (7, 7)], ids=["other", "same"])
def test_two_writers_of_one_step_do_not_mix(place: Place, contents: tuple[int, int]) -> None:
    """If two processes write a step at the same time, the store has one complete checkpoint.

    The other writer gets `existed`.
    """
    steps = 8
    writers = [child(RACE, place.location, byte, steps) for byte in contents]
    for writer in writers:
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
    store = place.open()
    for step in range(steps):
        answers = []
        for writer in writers:
            assert writer.stdin
            writer.stdin.write("\n")
            writer.stdin.flush()
        for writer in writers:
            assert writer.stdout
            answers.append(writer.stdout.readline().strip())
        assert set(answers) <= {"True", "False"}
        assert answers.count("False") == 1 or not place.creates_once
        found = store.newest()
        assert found.checkpoint
        assert (found.checkpoint.manifest.step, found.passed_over) == (step, ())
        (data,) = set(content(found.checkpoint).values())
        assert data in [bytes([byte]) * 30_000 for byte in contents]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    put(store, steps)
    assert len(place.names()) == 3 * (steps + 1), "a manifest and two files each, nothing else"
