"""The directory store: a checkpoint is there with every byte, or it is not there at all."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.numpy

import rekindle
from rekindle.checkpoints import directory, files
from rekindle.checkpoints.directory import Checkpoint, DirectoryStore, Part, Written
from rekindle.checkpoints.format import plan_layout, write_header
from rekindle.checkpoints.manifest import Manifest
from rekindle.errors import CheckpointError, CorruptError, UsageError

LOCK = ".lock"

# What a child process needs to write the same checkpoints as the tests do.
CHILD = """
import itertools, os, resource, signal, sys
from pathlib import Path
from rekindle.checkpoints import files
from rekindle.checkpoints.directory import DirectoryStore, Part
from rekindle.checkpoints.manifest import Manifest
from rekindle.errors import CheckpointError

store = DirectoryStore(Path(sys.argv[1]))

def manifest(step):
    return Manifest(job_id="job", step=step, generation=1, world_size=2, framework="torch",
                    created=0.0, writer=str(os.getpid()), rekindle="0")

def parts(byte, size):
    return {f"state-{i}.safetensors": Part([bytes([byte]) * size], (i,)) for i in range(2)}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    return DirectoryStore(root)


def manifest(step: int, generation: int = 1, job: str = "job") -> Manifest:
    return Manifest(
        job_id=job,
        step=step,
        generation=generation,
        world_size=2,
        framework="torch",
        data_position={"seen": step},
        created=1.5,
        writer="test",
        rekindle="0",
    )


def shard(value: int) -> memoryview:
    """A small safetensors file as a snapshot holds it."""
    layout = plan_layout([("w", "U8", (4,))], 2)
    buffer = memoryview(bytearray([value]) * layout.total_bytes)
    write_header(layout, {}, buffer)
    return buffer


def put(store: DirectoryStore, step: int, generation: int = 1) -> Written:
    """Write a checkpoint of two files whose content tells the step."""
    parts = {f"state-{i}.safetensors": Part([shard(step + i)], (i,)) for i in range(2)}
    return store.write(manifest(step, generation), parts)


def newest_step(store: DirectoryStore) -> int | None:
    found = store.newest().checkpoint
    return found.manifest.step if found else None


def content(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {entry.name: bytes(checkpoint.read(entry.name)) for entry in checkpoint.manifest.files}


def tree(path: Path) -> dict[str, bytes]:
    """Every file below, with its content."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def child(script: str, root: Path, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that runs the script after CHILD."""
    source = str(Path(rekindle.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + script, str(root), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_child(script: str, root: Path, *arguments: object) -> str:
    process = child(script, root, *arguments)
    output, _ = process.communicate()
    assert process.returncode == 0
    return output


def test_a_checkpoint_is_read_back(store: DirectoryStore, root: Path) -> None:
    """What was written is found, with its manifest, its bytes and plain safetensors files."""
    written = put(store, 7, generation=3)
    assert written == Written(root / "step-0000000007-g000003", 2 * len(shard(0)), existed=False)
    found = DirectoryStore(root).newest()
    assert found.passed_over == ()
    assert found.checkpoint
    assert found.checkpoint.path == written.path
    assert [(e.name, e.ranks) for e in found.checkpoint.manifest.files] == [
        ("state-0.safetensors", (0,)),
        ("state-1.safetensors", (1,)),
    ]
    assert found.checkpoint.manifest.data_position == {"seen": 7}
    assert content(found.checkpoint) == {
        "state-0.safetensors": bytes(shard(7)),
        "state-1.safetensors": bytes(shard(8)),
    }
    assert (
        safetensors.numpy.load_file(written.path / "state-1.safetensors")["w"].tolist() == [8] * 4
    )


def test_chunks_of_any_size_are_joined(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is its chunks in order, whatever their sizes and the size of one system call."""
    monkeypatch.setattr(files, "_PIECE", 7)
    chunks = [b"", b"abc", memoryview(bytes(range(100)))[3:90], bytearray(b"z" * 14), b""]
    store.write(manifest(1), {"a": Part(chunks, (0,)), "empty": Part([], (1,))})
    checkpoint = store.newest().checkpoint
    assert checkpoint
    assert content(checkpoint) == {"a": b"".join(map(bytes, chunks)), "empty": b""}


def test_bytes_handed_out_are_private(store: DirectoryStore, root: Path) -> None:
    """A file that shrinks after it was read changes nothing in the bytes handed out."""
    path = put(store, 1).path / "state-0.safetensors"
    checkpoint = store.newest().checkpoint
    assert checkpoint
    data = checkpoint.read("state-0.safetensors")
    os.truncate(path, 0)
    assert data == shard(1)


def test_writing_a_committed_checkpoint_again_changes_nothing(
    store: DirectoryStore, root: Path
) -> None:
    """The second writer of a step and generation is told so, and no file is touched."""
    first = put(store, 1)
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    again = store.write(manifest(1), {"other": Part([b"other"], (0, 1))})
    assert again == Written(first.path, first.bytes, existed=True)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


def test_another_jobs_checkpoint_is_not_taken_for_ones_own(store: DirectoryStore) -> None:
    """A directory that another job has written to is refused, and stays as it is."""
    put(store, 1)
    with pytest.raises(CheckpointError, match=r"of job 'job'.*'mine' a directory of its own"):
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
    lose_manifest: "no manifest: the write was not finished",
    empty_manifest: "the manifest is empty: the write was not finished",
    tear_manifest: "the manifest is torn",
    swap_manifest: "the manifest is of step 1, generation 1, not of this directory",
    lose_file: "state-0.safetensors is missing",
    tear_file: "state-0.safetensors has 100 bytes, the manifest says ",
    flip_bit: "checksum of state-1.safetensors differs: it has xxh3_128:",
    link_file: "state-0.safetensors is not a plain file",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(
    store: DirectoryStore, damage: Callable[[Path], None]
) -> None:
    """The next older checkpoint is used, and it is said what the newer one lacks."""
    put(store, 1)
    path = put(store, 2).path
    damage(path)
    found = store.newest()
    assert found.checkpoint
    assert found.checkpoint.manifest.step == 1
    (passed_over,) = found.passed_over
    assert passed_over.path == path
    assert passed_over.reason.startswith(DAMAGES[damage])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_written_over(
    store: DirectoryStore, damage: Callable[[Path], None]
) -> None:
    """What is left of an invalid checkpoint does not stand in the way of a new one."""
    put(store, 1)
    path = put(store, 2).path
    damage(path)
    assert not put(store, 2).existed
    assert newest_step(store) == 2
    assert len(list(path.iterdir())) == 3


def test_a_checkpoint_that_cannot_be_read_is_not_written_over(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passing input error is no proof of damage: nothing is removed because of it."""
    put(store, 1)
    put(store, 2)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(directory, "verify_file", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            put(store, 2)
        assert DirectoryStore(store.root).prune(1) == ()
        assert {p.reason for p in store.newest().passed_over} == {
            "it cannot be read: [Errno 5] Input/output error"
        }
    assert newest_step(store) == 2


def test_every_truncation_and_flipped_bit_is_recognised(store: DirectoryStore) -> None:
    """Whatever single bit or tail of a checkpoint is lost, the older one is found."""
    put(store, 1)
    path = store.write(manifest(2), {"a": Part([b"state"], (0, 1))}).path
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
    """Steps order checkpoints, then generations; at_most bounds the step."""
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
    """A missing and an empty root hold no checkpoint, which is no error; nothing is made there."""
    assert store.newest() == directory.Found(None, ())
    assert store.prune(1) == ()
    assert not root.exists()
    root.mkdir()
    assert store.newest() == directory.Found(None, ())


def test_foreign_files_are_left_alone(store: DirectoryStore, root: Path, tmp_path: Path) -> None:
    """What does not bear a checkpoint's exact name is neither looked at nor removed."""
    outside = put(DirectoryStore(tmp_path / "outside"), 99).path
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
    assert store.prune(1) == ()
    assert sorted(p.name for p in root.iterdir()) == before


def test_pruning_while_reading_is_met_by_looking_again(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all checkpoints vanish under the reader, it finds the newer one for which they went."""
    put(store, 1)
    other, genuine = DirectoryStore(store.root), files.verify_file

    def prune_then_verify(*arguments: object) -> None:
        monkeypatch.setattr(directory, "verify_file", genuine)
        put(other, 2)
        other.prune(1)
        genuine(*arguments)

    monkeypatch.setattr(directory, "verify_file", prune_then_verify)
    assert newest_step(store) == 2


def test_damage_after_the_search_is_recognised(store: DirectoryStore) -> None:
    """read() verifies again what it hands out, and knows only files of the manifest."""
    path = put(store, 1).path
    checkpoint = store.newest().checkpoint
    assert checkpoint
    with pytest.raises(CheckpointError, match=r"no file 'manifest.json'; it has: state-0"):
        checkpoint.read("manifest.json")
    flip_bit(path)
    tear_file(path)
    with pytest.raises(CorruptError, match=r"checksum of state-1\.safetensors differs"):
        checkpoint.read("state-1.safetensors")
    with pytest.raises(CorruptError, match=r"has 100 bytes"):
        checkpoint.read("state-0.safetensors")
    shutil.rmtree(path)
    with pytest.raises(CorruptError, match="is missing"):
        checkpoint.read("state-0.safetensors")


def test_prune_keeps_the_newest_valid_ones(store: DirectoryStore) -> None:
    """Damaged checkpoints do not count; only what is older than the last one kept goes."""
    paths = {step: put(store, step).path for step in range(1, 7)}
    flip_bit(paths[6])
    flip_bit(paths[4])
    lose_manifest(paths[3])
    assert store.prune(2) == (paths[2], paths[1])[1:]
    assert [step for step, path in paths.items() if path.exists()] == [2, 4, 5, 6]
    assert store.prune(1) == (paths[4], paths[2])
    assert newest_step(store) == 5


def test_prune_never_removes_the_last_valid_one(store: DirectoryStore) -> None:
    """With fewer valid checkpoints than are to be kept nothing goes, and zero is no number."""
    paths = [put(store, step).path for step in (1, 2, 3)]
    flip_bit(paths[1])
    flip_bit(paths[2])
    assert store.prune(1) == ()
    assert store.prune(9) == ()
    assert all(path.exists() for path in paths)
    with pytest.raises(UsageError, match="at least 1"):
        store.prune(0)


def test_prune_reads_only_what_it_does_not_know(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints that this process wrote are not read again, those it did not write are."""
    read: list[Path] = []
    monkeypatch.setattr(directory, "verify_file", lambda path, entry: read.append(path))
    paths = [put(store, step).path for step in (1, 2, 3)]
    assert store.prune(2) == (paths[0],)
    assert read == []
    assert DirectoryStore(store.root).prune(2) == ()
    assert len(read) == 4


def test_a_half_pruned_checkpoint_does_not_count(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When removal fails midway the manifest is gone already, and the error says so."""
    old, new = put(store, 1).path, put(store, 2).path

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        with pytest.raises(CheckpointError, match=r"cannot prune .*check the disk"):
            store.prune(1)
    lose_manifest(new)
    assert [item.path for item in store.newest().passed_over] == [new, old]


@pytest.mark.parametrize(("limit", "size"), [(1000, 2000), (200, 100)], ids=["shard", "manifest"])
def test_a_refused_write_leaves_nothing(root: Path, limit: int, size: int) -> None:
    """When the kernel refuses a write, the error tells why and the older checkpoint is left."""
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
    """A root that is a file, or lies below one, is an error for writer and reader alike."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*choose another"):
        put(DirectoryStore(tmp_path / "file" / "checkpoints"), 1)
    with pytest.raises(CheckpointError, match=r"cannot read .*choose a directory"):
        DirectoryStore(tmp_path / "file").newest()


def test_an_interrupted_write_leaves_nothing(store: DirectoryStore, root: Path) -> None:
    """Whatever ends the write, the interrupt of a user included, the partial directory goes."""

    class Interrupted(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            yield b"some"
            raise KeyboardInterrupt

    put(store, 1)
    before = tree(root)
    with pytest.raises(KeyboardInterrupt):
        store.write(manifest(2), {"a": Part(Interrupted(), (0,))})
    assert tree(root) == before
    assert put(store, 2).bytes


@pytest.mark.parametrize("name", ["../a", "a/b", "..", "", "manifest.json", "-a\n"])
def test_a_bad_name_is_refused_before_anything_is_written(
    store: DirectoryStore, root: Path, name: str
) -> None:
    """A file name that a manifest may not hold raises an error, and no directory is made."""
    with pytest.raises(CheckpointError, match="the manifest names"):
        store.write(manifest(1), {name: Part([b"x"], (0,))})
    assert not root.exists()


def test_unfinished_writes_are_swept_up(store: DirectoryStore, root: Path) -> None:
    """What killed writers left, of any step, is gone after the next write and after pruning."""
    for sweep in (lambda: put(store, 5), lambda: store.prune(9)):
        put(store, 1)
        for step in (3, 8):
            (root / f"step-{step:010d}-g000001").mkdir()
            (root / f"step-{step:010d}-g000001" / "state-0.safetensors").write_bytes(b"half")
        (root / "step-0000000008-g000001" / "manifest.json").write_bytes(b"")
        sweep()
        assert store.newest().passed_over == ()
        assert not [p for p in root.iterdir() if "step-0000000003" in p.name or "08-g" in p.name]


def test_a_file_system_without_locks_is_used(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store works where the kernel offers no locks, and any other refusal is an error."""

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
    """A child forked in the middle of a write does not hold the lock after it."""
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

store.write(manifest(1), {"a": Part(Forking(), (0,))})
with open(sys.argv[1] + "/.lock") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("free")
"""
    assert run_child(script, root) == "free\n"


def test_two_writers_of_one_step_do_not_mix(root: Path) -> None:
    """Of two processes that write each step at once one commits it whole, the other is told so."""
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
    """The newest step, after its content was compared with what CHILD writes."""
    found = DirectoryStore(root).newest()
    assert {item.reason.split(":")[0] for item in found.passed_over} <= {
        "no manifest",
        "the manifest is empty",
        "the manifest is torn or was never one",
    }
    if not found.checkpoint:
        return -1
    step = found.checkpoint.manifest.step
    for data in content(found.checkpoint).values():
        assert set(data) == {step % 256}
    return step


CRASH = """
files._PIECE = 400

def crash_at(call):
    def profile(frame, event, function):
        nonlocal call
        if event == "c_call" and function.__module__ in ("posix", "fcntl"):
            call -= 1
            if call < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(profile)

store.write(manifest(0), parts(0, 1000))
store.write(manifest(1), parts(1, 1000))
for step in itertools.count(2):
    if not os.fork():
        crash_at(step - 2)
        store.write(manifest(step), parts(step % 256, 1000))
        store.prune(2)
        os._exit(0)
    status = os.wait()[1]
    print("finished" if status == 0 else "killed", flush=True)
    sys.stdin.readline()
    if status == 0:
        break
"""


def test_a_crash_at_any_system_call_leaves_a_valid_checkpoint(root: Path) -> None:
    """SIGKILL before each system call of write and prune in turn loses no committed checkpoint."""
    with child(CRASH, root) as process:
        assert process.stdout
        assert process.stdin
        newest, kills, committed = 1, 0, 0
        while process.stdout.readline() == "killed\n":
            step = assert_reads_right(root)
            assert step in (newest, kills + 2)
            if step != newest:  # else each crash leaves more to prune than the next one gets done
                committed += 1
                DirectoryStore(root).prune(2)
            newest, kills = step, kills + 1
            process.stdin.write("\n")
            process.stdin.flush()
        process.stdin.write("\n")
    assert process.returncode == 0
    assert kills > 30
    assert committed > 5
    assert assert_reads_right(root) == kills + 2
    assert len(list(root.iterdir())) == 3, "two checkpoints and the lock; no left-over"


@pytest.mark.parametrize("seed", range(12))
def test_a_writer_killed_at_a_random_moment_leaves_a_valid_checkpoint(
    root: Path, seed: int
) -> None:
    """SIGKILL from outside, also in the middle of a system call, never makes a wrong checkpoint."""
    script = """
class Marked(list):
    def __iter__(self):
        for chunk in super().__iter__():
            os.write(1, b".")
            yield chunk

for step in itertools.count():
    chunk = bytes([step % 256]) * 200_000
    store.write(manifest(step), {f"s{i}": Part(Marked([chunk] * 5), (i,)) for i in range(2)})
    store.prune(2)
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
