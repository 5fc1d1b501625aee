"""Publishing copies a verified checkpoint once and returns a permanent reference."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec
import pytest
from stores import content, latest_at, manifest, shard
from stores.places import DirectoryPlace, Place
from waiting import bound_s

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.location import above, below
from rekindle.checkpoints.publishing import (
    LATEST_FILE,
    Latest,
    address,
    announce,
    publish,
    resolve,
    withdraw,
)
from rekindle.checkpoints.store import Checkpoint, CheckpointFile
from rekindle.errors import CheckpointError, CorruptError, UsageError

KEY = (7, 1)


def written(root: Path, job: str = "job", byte: int = 1) -> Checkpoint:
    """Write a checkpoint of two files into a store and return it."""
    store = DirectoryStore(root)
    parts = {f"state-{i}.safetensors": CheckpointFile([shard(byte + i)], (i,)) for i in range(2)}
    store.write(manifest(*KEY, job=job), parts)
    found = store.find(*KEY)
    assert found is not None
    return found


def only(names: list[str], ending: str) -> str:
    """Return the first file of a checkpoint, or its manifest."""
    return next(name for name in sorted(names) if name.endswith(ending) and "state-1" not in name)


def test_it_is_a_copy_with_a_reference(place: Place, tmp_path: Path) -> None:
    """A published copy remains after the source is removed, and its reference leads to it."""
    source = written(tmp_path / "store")
    was = content(source)
    published = publish(source, place.location)
    assert not published.existed
    location, _, digest = published.reference.partition("#")
    assert above(location) == (below(place.location, "job"), "step-0000000007-g000001")
    assert digest.startswith("xxh3_128:")
    (source.path / "manifest.json").unlink()
    found = resolve(published.reference)
    assert (found.location, content(found)) == (published.location, was)


def test_twice_is_once(place: Place, tmp_path: Path) -> None:
    """A second publish of a checkpoint returns the same reference and writes nothing."""
    source = written(tmp_path / "store")
    first = publish(source, place.location)
    tree = place.tree()
    second = publish(source, place.location)
    assert (second.existed, second.reference) == (True, first.reference)
    assert place.tree() == tree


def test_the_reference_is_of_the_content(tmp_path: Path) -> None:
    """The digest of a reference depends on the content, not on the place or the files' names."""
    source = written(tmp_path / "store")
    references = [publish(source, str(tmp_path / name)).reference for name in ("a", "b")]
    ends = {reference.partition("#")[2] for reference in references}
    assert len(ends) == 1
    other = publish(written(tmp_path / "other", byte=2), str(tmp_path / "c")).reference
    assert other.partition("#")[2] not in ends


def test_a_damaged_copy_is_made_again(place: Place, tmp_path: Path) -> None:
    """A publish repairs a damaged copy; the reference stays the same."""
    source = written(tmp_path / "store")
    first = publish(source, place.location)
    victim = only(place.names(), ".safetensors")
    place.put(victim, b"x" * len(place.get(victim)))
    assert publish(source, place.location).reference == first.reference
    assert content(resolve(first.reference)) == content(source)


def test_what_is_damaged_is_not_published(place: Place, tmp_path: Path) -> None:
    """A damaged checkpoint raises CorruptError; its publishing leaves no manifest.

    The damage can occur after the source was found.
    """
    source = written(tmp_path / "store")
    victim = next(source.path.glob("*.safetensors"))
    victim.write_bytes(b"x" * victim.stat().st_size)
    with pytest.raises(CorruptError):
        publish(source, place.location)
    assert not [name for name in place.names() if name.endswith("manifest.json")]


def test_jobs_do_not_meet(place: Place, tmp_path: Path) -> None:
    """Two jobs with the same step get different locations and references."""
    both = [
        publish(written(tmp_path / name, job=name), place.location)
        for name in ("monday", "tuesday")
    ]
    assert both[0].location != both[1].location
    assert both[0].reference != both[1].reference


def test_another_checkpoint_of_the_same_step(place: Place, tmp_path: Path) -> None:
    """Another checkpoint with the same job, step and generation is refused.

    The published one does not change.
    """
    first = publish(written(tmp_path / "store"), place.location)
    with pytest.raises(CheckpointError, match="has the same step and generation"):
        publish(written(tmp_path / "again", byte=2), place.location)
    assert content(resolve(first.reference)) == content(written(tmp_path / "store"))


def test_a_reference_to_what_was_changed(place: Place, tmp_path: Path) -> None:
    """A reference is refused if its checkpoint was removed or replaced."""
    reference = publish(written(tmp_path / "store"), place.location).reference
    for name in place.names():
        place.delete(name)
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        resolve(reference)
    publish(written(tmp_path / "again", byte=2), place.location)
    with pytest.raises(CorruptError, match="has changed since it was published"):
        resolve(reference)


@pytest.mark.parametrize("text", ["", "#", "/a/step-0000000007-g000001", "/a/b#xxh3_128:0", "a"])
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(UsageError, match="not a reference"):
        resolve(text)


@pytest.mark.parametrize("location", ["/a/b", "s3://b/c?endpoint=http://h:1&addressing=path"])
def test_a_place_below_another(location: str) -> None:
    """`above` reverses `below`."""
    assert above(below(location, "name")) == (location, "name")


def latest(created: float, step: int = 1) -> Latest:
    return Latest(reference="r#1", location="r", job_id="job", step=step, created=created)


def test_the_latest_is_the_one_that_was_made_last(place: Place) -> None:
    """The pointer leads to the newest checkpoint by creation time, not by publishing time."""
    assert latest_at(place.location) is None
    assert announce(latest(2.0), place.location)
    assert not announce(latest(1.0), place.location)
    assert announce(latest(3.0, step=2), place.location)
    assert announce(latest(3.0, step=2), place.location)  # twice
    found = latest_at(place.location)
    assert found is not None
    assert found.alone() == latest(3.0, step=2)
    assert [name for name in place.names() if name != LATEST_FILE] == []


def test_a_withdrawn_pointer_has_its_earlier_contents(place: Place) -> None:
    """A withdrawal returns what the pointer had before, or removes it; twice does nothing."""
    announce(latest(1.0), place.location)
    announce(latest(2.0, step=2), place.location)
    announce(latest(2.0, step=2), place.location)  # a rerun
    assert withdraw(latest(2.0, step=2), place.location)
    assert latest_at(place.location) == latest(1.0)
    assert not withdraw(latest(2.0, step=2), place.location)
    assert withdraw(latest(1.0), place.location)
    assert latest_at(place.location) is None
    assert not withdraw(latest(1.0), place.location)


def test_the_pointer_of_another_publisher_stays(place: Place) -> None:
    """A withdrawal does nothing after another publisher, also if that one had the same step."""
    announce(latest(1.0), place.location)
    announce(latest(2.0), place.location)
    announce(latest(3.0), place.location)
    assert not withdraw(latest(2.0), place.location)
    found = latest_at(place.location)
    assert found is not None
    assert found.alone() == latest(3.0)
    assert found.replaced == latest(2.0)


def test_the_address_is_known_before(place: Place, tmp_path: Path) -> None:
    """`address` returns the location that a publication then has."""
    source = written(tmp_path / "store")
    where = address(source, place.location)
    assert publish(source, place.location).location == where


def test_a_damaged_pointer_is_told(place: Place) -> None:
    """A damaged pointer is an error: no writer replaces it."""
    announce(latest(1.0), place.location)
    place.put(LATEST_FILE, b'{"reference": ')
    with pytest.raises(CorruptError, match="damaged; remove it"):
        announce(latest(2.0), place.location)


_PUBLISHERS = """
import sys
from rekindle.checkpoints.publishing import Latest, announce
location, first = sys.argv[1], int(sys.argv[2])
sys.stdin.readline()
for number in range(first, 20, 2):
    announce(Latest(reference="r", location="r", job_id="j", step=number, created=number), location)
"""


def test_many_publish_at_once(place: Place) -> None:
    """If the server supports conditions, simultaneous publishers never move the pointer back."""
    command = [sys.executable, "-c", _PUBLISHERS, place.location]
    publishers = [Popen([*command, str(first)], stdin=PIPE, text=True) for first in range(2)]
    for each in publishers:
        assert each.stdin
        each.stdin.write("go\n")
        each.stdin.flush()
    for each in publishers:
        each.communicate(timeout=bound_s())
    assert [each.returncode for each in publishers] == [0, 0]
    found = latest_at(place.location)
    assert found is not None
    if place.creates_once:
        assert found.step == 19
    assert found.step in (18, 19)


def test_a_pointer_of_a_killed_writer(tmp_path: Path) -> None:
    """A later publisher replaces the unfinished pointer file of a killed one."""
    (tmp_path / ".latest.json.new").write_bytes(msgspec.json.encode({"half": 1})[:5])
    assert announce(latest(1.0), str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", LATEST_FILE]


def test_a_directory_place_can_be_listed(tmp_path: Path) -> None:
    """A published directory has plain files in plain folders, which other tools can list."""
    source = written(tmp_path / "store")
    publish(source, str(tmp_path / "out"))
    names = DirectoryPlace(tmp_path / "out" / "job").files(*KEY)
    assert [name.rpartition("/")[2] for name in names] == [
        "manifest.json",
        "state-0.safetensors",
        "state-1.safetensors",
    ]
