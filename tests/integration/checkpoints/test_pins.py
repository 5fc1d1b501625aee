"""Pins and readers keep their checkpoints from prunes; the lease of a killed reader expires."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from stores import child, manifest, put, put_parts
from waiting import wait_until

from rekindle.checkpoints import pins
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.pins import Pin, check_name, pin_of
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import read_file, reading
from rekindle.errors import CheckpointError

LAST = Retention(last=1)


def markers(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "pins").glob("step-*"))


def test_a_pinned_checkpoint_stays(store: DirectoryStore, root: Path) -> None:
    """No process prunes a checkpoint while it has a pin; each of its pins has its own name."""
    for step in (1, 2, 3):
        put(store, step)
    release, audit = Pin((1, 1), "release"), Pin((1, 1), "audit_2")
    assert store.pin(release)
    assert store.pin(release)
    assert DirectoryStore(root).pin(audit)
    assert DirectoryStore(root).prune(LAST) == ((2, 1),)
    assert DirectoryStore(root).pins() == [audit, release]
    store.unpin(release)
    store.unpin(release)
    assert store.prune(LAST) == ()
    store.unpin(audit)
    assert store.prune(LAST) == ((1, 1),)
    assert store.keys() == [(3, 1)]


def test_a_pin_that_comes_while_a_prune_runs(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin protects its checkpoint if it exists before a prune takes the lock of the pins."""
    for step in (1, 2):
        put(store, step)
    late, real = [Pin((1, 1), "release")], pins.locked

    @contextlib.contextmanager
    def locked(path: Path) -> Iterator[None]:
        if late:
            assert DirectoryStore(root).pin(late.pop())
        with real(path):
            yield

    monkeypatch.setattr(pins, "locked", locked)
    assert store.prune(LAST) == ()
    assert late == []
    assert store.keys() == [(2, 1), (1, 1)]


def test_what_is_not_there_cannot_be_pinned(store: DirectoryStore, root: Path) -> None:
    """A missing checkpoint cannot be pinned or read, and the attempt creates no file."""
    assert not store.pin(Pin((1, 1), "release"))
    gone = pytest.raises(CheckpointError, match="has no checkpoint step-0000000001-g000001")
    with gone, reading(store, (1, 1)):
        pass
    assert not root.exists()
    put(store, 1)
    assert store.pins() == []
    assert not store.pin(Pin((2, 1), "release"))
    assert store.pins() == []


def test_names_of_pins() -> None:
    """A pin is read from the name of its file; files with other names are not pins."""
    for pin in (Pin((7, 3), "a-B_9"), Pin((10**11, 1), "read-x", 1_700_000_000)):
        assert pin_of(pin.marker) == pin
    for name in ("", ".lock", "step-0000000001-g000001", "step-1-g1.x", "notes.txt"):
        assert pin_of(name) is None
    for name in ("", "a.b", "a/b", "a@1", "ü", "x" * 101):
        with pytest.raises(CheckpointError, match="is not a valid name of a pin"):
            check_name(name)


def test_what_is_read_stays(store: DirectoryStore, root: Path) -> None:
    """A prune keeps a checkpoint during a read, even if the read takes longer than one lease."""
    put_parts(store, 1)
    put_parts(store, 2)
    with reading(store, (1, 1), lease_s=1.5):
        for _ in range(4):  # each round renews the lease by at least one second
            before = set(markers(root))
            assert DirectoryStore(root).prune(LAST) == ()
            assert len(before) in (1, 2)
            wait_until(lambda seen=before: seen.isdisjoint(markers(root)), "a longer lease", 10.0)
    assert markers(root) == []
    assert store.prune(LAST) == ((1, 1),)


READER = """
from rekindle.checkpoints.store import reading
with reading(store, (1, 1), lease_s=float(sys.argv[2])):
    print("reads", flush=True)
    sys.stdin.read()
"""


def test_a_killed_reader_keeps_nothing_for_ever(store: DirectoryStore, root: Path) -> None:
    """The checkpoint of a killed reader stays until its lease ends; a prune then removes it.

    The prune also removes the reader's marker.
    """
    put(store, 1)
    put(store, 2)
    with child(READER, root, 1.0) as process:
        assert process.stdout
        assert process.stdout.readline() == "reads\n"
        assert store.prune(LAST) == ()
        process.kill()
    assert markers(root)
    wait_until(lambda: store.prune(LAST) == ((1, 1),), "the end of the lease", 10.0)
    assert markers(root) == []


def test_readers_and_a_pruner_at_once(store: DirectoryStore, root: Path) -> None:
    """A reader with a lease can read all files of its checkpoint during other writes and prunes."""
    put(store, 0)
    over = threading.Event()
    failures: list[BaseException] = []
    read = [0, 0]

    def write() -> None:
        own = DirectoryStore(root)
        for step in range(1, 40):
            put(own, step)
            own.prune(LAST)
        over.set()

    def keep_reading(number: int) -> None:
        own = DirectoryStore(root)
        try:
            while not over.is_set():
                key = own.keys()[-1]
                with contextlib.suppress(CheckpointError), reading(own, key):
                    # Errors after this line are not suppressed: the checkpoint must exist.
                    try:
                        found = own.find(*key)
                        assert found is not None
                        for entry in found.manifest.files:
                            read_file(found, entry.name)
                        assert own.find(*key) is not None
                    except CheckpointError as error:
                        raise AssertionError(str(error)) from error
                    read[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=keep_reading, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    write()
    for thread in threads:
        thread.join()
    assert failures == []
    assert min(read) > 0
    store.prune(LAST)
    assert markers(root) == []
    assert store.keys() == [(39, 1)]


def test_best_by_what_steps_have_logged(store: DirectoryStore, root: Path) -> None:
    """The rule `best` reads the manifests' metrics; a damaged checkpoint is never the best one."""

    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.05), (5, 1.0)):
        store.write(msgspec.structs.replace(manifest(step), metrics={"loss": loss}), {})
    (root / "step-0000000004-g000001" / "manifest.json").write_text("{}")
    assert store.prune(Retention(best=1, metric="loss")) == ((4, 1), (3, 1), (1, 1))


def test_a_reader_that_may_not_write(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader without write permission reads without a pin; a pin then is an error."""

    def refuse(*_: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    put(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(pins, "add", refuse)
        with reading(store, (1, 1)):
            assert markers(root) == []
        with pytest.raises(CheckpointError, match="give this user access to it"):
            store.pin(Pin((1, 1), "release"))
