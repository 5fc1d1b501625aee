"""The directory store: failed, killed and simultaneous writes leave no partial checkpoint."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stores import CRASH_AT, LOCK, child, content, manifest, newest_step, put, run_child, tree

from rekindle.checkpoints.checkpoint_path import UNFINISHED
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import CheckpointFile
from rekindle.errors import CheckpointError


@pytest.mark.parametrize(("limit", "size"), [(1000, 2000), (200, 100)], ids=["shard", "manifest"])
def test_a_refused_write_leaves_nothing(root: Path, limit: int, size: int) -> None:
    """If the kernel refuses a write, the error has the reason and the older checkpoint remains."""
    put(DirectoryStore(root), 1)
    before = tree(root)
    script = """
limit, size = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    store.write(manifest(2), parts(2, size))
except CheckpointError as error:
    print(error)
"""
    message = run_child(script, root, limit, size)
    assert f"cannot write the checkpoint {root / 'step-0000000002-g000001'}" in message
    assert "File too large" in message
    assert "raise the limit on file sizes" in message
    assert tree(root) == before
    assert [p.name for p in sorted(root.iterdir())] == [LOCK, "step-0000000001-g000001"]
    assert newest_step(DirectoryStore(root)) == 1


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A root that is a file, or inside one, is an error for writers and readers."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*choose another"):
        put(DirectoryStore(tmp_path / "file" / "checkpoints"), 1)
    with pytest.raises(CheckpointError, match=r"cannot read .*choose a directory"):
        DirectoryStore(tmp_path / "file").newest()


def test_an_interrupted_write_leaves_nothing(store: DirectoryStore, root: Path) -> None:
    """A write that an exception ends, such as KeyboardInterrupt, removes its partial directory."""

    class Interrupted(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield b"some"
            raise KeyboardInterrupt

    put(store, 1)
    before = tree(root)
    with pytest.raises(KeyboardInterrupt):
        store.write(manifest(2), {"a": CheckpointFile(Interrupted(), (0,))})
    assert tree(root) == before
    assert put(store, 2).bytes


@pytest.mark.parametrize("name", ["../a", "a/b", "..", "", "manifest.json", "-a\n"])
def test_a_bad_name_is_refused_before_anything_is_written(
    store: DirectoryStore, root: Path, name: str
) -> None:
    """An invalid file name raises an error before the store creates a directory."""
    with pytest.raises(CheckpointError, match="the manifest lists the file"):
        store.write(manifest(1), {name: CheckpointFile([b"x"], (0,))})
    assert not root.exists()


def test_unfinished_writes_are_swept_up_once_they_are_old(
    store: DirectoryStore, root: Path
) -> None:
    """A newer checkpoint or a prune removes the unfinished directories of killed writers.

    Readers skip unfinished directories that are newer.
    """
    for sweep in (lambda: put(store, 5), lambda: store.prune(Retention(last=9))):
        put(store, 1)
        for step in (3, 8):
            (root / f"step-{step:010d}-g000001").mkdir()
            (root / f"step-{step:010d}-g000001" / "state-0.safetensors").write_bytes(b"half")
        (root / "step-0000000008-g000001" / "manifest.json").write_bytes(b"")
        sweep()
        assert not (root / "step-0000000003-g000001").exists()
        (passed_over,) = store.newest().passed_over
        assert Path(passed_over.location) == root / "step-0000000008-g000001"
        shutil.rmtree(Path(passed_over.location))
    (root / "step-0000000008-g000001").mkdir()
    put(store, 8, generation=2)
    assert not (root / "step-0000000008-g000001").exists()


def test_a_file_system_without_locks_is_used(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store works on a file system without locks; each other lock error is an error."""

    def refuse(code: int) -> Callable[..., None]:
        def flock(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        return flock

    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    put(store, 1)
    assert newest_step(store) == 1
    monkeypatch.setattr(fcntl, "flock", refuse(errno.EIO))
    with pytest.raises(CheckpointError, match="Input/output error"):
        put(store, 2)


def test_the_lock_is_free_after_a_write_during_which_a_process_was_forked(root: Path) -> None:
    """A child process forked during a write does not hold the lock after that write."""
    script = """
import fcntl
reader, writer = os.pipe()

class Forking(list):
    def __iter__(self):
        if not os.fork():
            os.close(writer)
            os.read(reader, 1)  # until the parent has ended
            os._exit(0)
        yield b"x"

store.write(manifest(1), {"a": CheckpointFile(Forking(), (0,))})
with open(sys.argv[1] + "/.lock") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("free")
"""
    assert run_child(script, root) == "free\n"


def test_two_writers_of_one_step_do_not_mix(root: Path) -> None:
    """If two processes write a step at the same time, one commits and the other gets `existed`."""
    script = """
byte, steps = map(int, sys.argv[2:])
print("ready", flush=True)
sys.stdin.readline()
for step in range(steps):
    print(store.write(manifest(step), parts(byte, 300_000)).existed)
"""
    steps = 30
    writers = [child(script, root, byte, steps) for byte in (1, 2)]
    for writer in writers:
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
    outputs = []
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        outputs.append(writer.communicate()[0].split())
        assert writer.returncode == 0
    assert all({first, second} == {"True", "False"} for first, second in zip(*outputs, strict=True))
    store = DirectoryStore(root)
    for step in range(steps):
        found = store.newest(at_most=step)
        assert found.checkpoint
        assert found.checkpoint.manifest.step == step
        assert len(set(content(found.checkpoint).values())) == 1
        assert not found.passed_over


def assert_reads_right(root: Path) -> int:
    """Return the newest step, after a check of its content against the writers' bytes."""
    found = DirectoryStore(root).newest()
    assert {item.reason.split(":")[0] for item in found.passed_over} <= {
        UNFINISHED,
        "the manifest is empty, because the write did not finish",
        "the file is incomplete or is not a manifest",
    }
    if not found.checkpoint:
        return -1
    step = found.checkpoint.manifest.step
    for data in content(found.checkpoint).values():
        assert set(data) == {step % 256}
    return step


# Each round leaves an unfinished part, so that SIGKILL also interrupts its removal.
CRASH = """
store.write(manifest(0), parts(0, 1000))
store.write(manifest(1), parts(1, 1000))
for call in itertools.count():
    step = int(sys.stdin.readline())
    store.write_part(0, 0, "left", CheckpointFile([b"over"], ()))
    if not os.fork():
        crash_at(call)
        store.write(manifest(step), parts(step % 256, 1000))
        store.prune(Retention(last=2))
        os._exit(0)
    status = os.wait()[1]
    print("finished" if status == 0 else "killed", flush=True)
    if status == 0:
        break
"""


def test_a_crash_at_any_system_call_leaves_a_valid_checkpoint(root: Path) -> None:
    """SIGKILL before each system call of write and prune loses no committed checkpoint."""
    with child(CRASH_AT + CRASH, root) as process:
        assert process.stdout
        assert process.stdin
        newest, kills, committed = 1, 0, 0
        while True:
            process.stdin.write(f"{newest + 1}\n")
            process.stdin.flush()
            if process.stdout.readline() != "killed\n":
                break
            step = assert_reads_right(root)
            assert step in (newest, newest + 1)
            if step != newest:  # otherwise each crash would leave more than the next prune removes
                committed += 1
                DirectoryStore(root).prune(Retention(last=2))
            newest, kills = step, kills + 1
    assert process.returncode == 0
    assert kills > 30
    assert committed > 5
    assert assert_reads_right(root) == newest + 1
    assert len(list(root.iterdir())) == 4, "two checkpoints, lock and pins; no left-over"


@pytest.mark.parametrize("seed", range(12))
def test_a_writer_killed_at_a_random_moment_leaves_a_valid_checkpoint(
    root: Path, seed: int
) -> None:
    """SIGKILL at a random moment, also during a system call, leaves only valid checkpoints."""
    script = """
class Marked(list):
    def __iter__(self):
        for chunk in super().__iter__():
            os.write(1, b".")
            yield chunk

for step in itertools.count():
    chunk = bytes([step % 256]) * 200_000
    shards = {f"s{i}": CheckpointFile(Marked([chunk] * 5), (i,)) for i in range(2)}
    store.write(manifest(step), shards)
    store.prune(Retention(last=2))
"""
    with child(script, root) as process:
        assert process.stdout
        process.stdout.read(random.Random(seed).randrange(1, 60))
        process.send_signal(signal.SIGKILL)
    step = assert_reads_right(root)
    store = DirectoryStore(root)
    put(store, step + 1)
    assert newest_step(store) == step + 1
    assert store.newest().passed_over == ()
