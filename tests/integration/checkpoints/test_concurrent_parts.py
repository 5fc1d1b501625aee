"""Parts written at the same time: a failed or killed writer leaves the other parts unchanged."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from stores import (
    CRASH_AT,
    child,
    content,
    newest_step,
    put,
    put_parts,
    run_child,
    tree,
    with_files,
    write_parts,
)

from rekindle.checkpoints import multi_writer as parts
from rekindle.checkpoints.block_checksums import summed
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.manifest import FileEntry
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.store import CheckpointFile, Written, read_file
from rekindle.errors import CheckpointError

# A process that stops in the middle of its part, prints "middle", and continues at a line of input.
STOPS = """
import msgspec

def stopping(first, second):
    yield first
    print("middle", flush=True)
    sys.stdin.readline()
    yield second

def write(rank, step, generation=1):
    part = CheckpointFile(stopping(*[bytes([rank]) * 100_000] * 2), (rank,))
    entry = store.write_part(step, generation, f"state-{rank}", part)
    print(msgspec.json.encode(entry).decode(), flush=True)
"""


def writer(root: Path, rank: int, step: int) -> subprocess.Popen[str]:
    """Return a process that has written the first half of its part."""
    process = child(f"{STOPS}\nwrite({rank}, {step})", root)
    assert process.stdout
    assert process.stdout.readline() == "middle\n"
    return process


def finish(process: subprocess.Popen[str]) -> FileEntry:
    output, _ = process.communicate("\n")
    assert process.returncode == 0
    return msgspec.json.decode(output, type=FileEntry)


def test_parts_written_at_the_same_time_make_a_checkpoint(
    store: DirectoryStore, root: Path
) -> None:
    """Four processes write their parts at the same time; one commit makes a checkpoint of them."""
    writers = [writer(root, rank, 7) for rank in range(4)]
    assert store.find(7, 1) is None
    assert newest_step(store) is None
    files = tuple(finish(process) for process in writers)
    assert [(f.name, f.bytes, f.ranks) for f in files] == [
        (f"state-{rank}", 200_000, (rank,)) for rank in range(4)
    ]
    assert store.find(7, 1) is None
    written = store.commit(with_files(7, files))
    assert written == Written(str(root / "step-0000000007-g000001"), 800_000, existed=False)
    found = DirectoryStore(root).find(7, 1)
    assert found
    assert found.path == Path(written.location)
    assert found.manifest == with_files(7, files)
    for rank in range(4):
        assert read_file(found, f"state-{rank}") == bytes([rank]) * 200_000
    assert newest_step(DirectoryStore(root)) == 7


def test_parts_are_begun_at_the_same_time(store: DirectoryStore, root: Path) -> None:
    """Processes can create the root and the checkpoints' directories at the same time."""
    script = """
rank = int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for step in range(20):
    store.write_part(step, 1, f"state-{rank}", CheckpointFile([bytes([rank, step])], (rank,)))
"""
    writers = [child(script, root, rank) for rank in range(4)]
    for process in writers:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in writers:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    assert tree(root) == {
        ".lock": b"",
        **{
            f"step-{step:010d}-g000001/state-{rank}": bytes([rank, step])
            for step in range(20)
            for rank in range(4)
        },
    }


def test_a_part_of_a_killed_writer_is_written_again(store: DirectoryStore, root: Path) -> None:
    """A commit refuses the partial file of a killed writer; a new writer replaces that file."""
    files = [finish(writer(root, 0, 5))]
    with writer(root, 1, 5) as killed:
        killed.send_signal(signal.SIGKILL)
    assert (root / "step-0000000005-g000001" / "state-1").stat().st_size == 100_000
    whole = msgspec.structs.replace(files[0], name="state-1")
    with pytest.raises(CheckpointError, match="state-1 has 100000 bytes, the manifest has 200000"):
        store.commit(with_files(5, (files[0], whole)))
    files.append(finish(writer(root, 1, 5)))
    assert not store.commit(with_files(5, tuple(files))).existed
    found = store.find(5, 1)
    assert found
    assert content(found) == {f"state-{rank}": bytes([rank]) * 200_000 for rank in range(2)}


CRASH = """
import msgspec

def checkpoint(step):
    files = tuple(
        store.write_part(step, 1, name, part) for name, part in parts(step % 256, 1000).items()
    )
    store.commit(msgspec.structs.replace(manifest(step), files=files))

checkpoint(1)
for call in itertools.count():
    store.prune(Retention(last=1))
    if not os.fork():
        crash_at(call)
        checkpoint(call + 2)
        os._exit(0)
    status = os.wait()[1]
    print("finished" if status == 0 else "killed", flush=True)
    sys.stdin.readline()
    checkpoint(call + 2)
    print("again", flush=True)
    sys.stdin.readline()
    if status == 0:
        break
"""


def test_a_crash_at_any_system_call_leaves_parts_or_a_checkpoint(root: Path) -> None:
    """SIGKILL before any system call of write_part and commit leaves parts or a checkpoint.

    The same write then succeeds.
    """
    store, step, committed, missing = DirectoryStore(root), 1, 0, 0
    with child(CRASH_AT + CRASH, root) as process:
        assert process.stdout
        assert process.stdin
        line = ""
        while line != "finished\n":
            line, step = process.stdout.readline(), step + 1
            for expected in ("", "again\n"):
                assert not expected or process.stdout.readline() == expected
                found = store.find(step, 1)
                committed, missing = committed + bool(found), missing + (not found)
                assert found or not expected
                assert not found or set(b"".join(content(found).values())) == {step % 256}
                assert newest_step(store) == (step if found else step - 1)
                process.stdin.write("\n")
                process.stdin.flush()
    assert process.returncode == 0
    assert missing > 30
    assert committed > missing + 5
    assert store.newest().passed_over == ()
    assert len(list(root.iterdir())) == 4, "two checkpoints, the lock and the pins; no left-over"


def test_a_commit_between_look_and_lock_is_seen(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that gets the lock after a commit returns the entry of the committed part."""
    files, genuine = write_parts(store, 1), parts.locked

    def commit_then_lock(path: Path) -> object:
        monkeypatch.setattr(parts, "locked", genuine)
        assert not DirectoryStore(root).commit(with_files(1, files)).existed
        return genuine(path)

    monkeypatch.setattr(parts, "locked", commit_then_lock)
    assert store.write_part(1, 1, "state-0", CheckpointFile([b"late"], (0,))) == files[0]
    assert newest_step(store) == 1


class Meanwhile(list[bytes]):
    """Chunks of a part; an action runs after the first one."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__([b"first", b"second"])
        self.action = action

    def __iter__(self) -> Iterator[bytes]:
        yield self[0]
        self.action()
        yield self[1]


def test_a_part_removed_or_replaced_while_it_is_written_is_an_error(
    store: DirectoryStore, root: Path
) -> None:
    """A writer whose file was removed or replaced during its write gets an error.

    If two writers write the same part, the file of the writer that started last remains.
    """
    with pytest.raises(
        CheckpointError, match=r"another process removed or replaced .*step-.*2-g000001/state-0"
    ):
        store.write_part(2, 1, "state-0", CheckpointFile(Meanwhile(lambda: put(store, 3)), (0,)))
    assert sorted(p.name for p in root.iterdir()) == [".lock", "step-0000000003-g000001"]

    with pytest.raises(CheckpointError, match="or wrote the same file"):
        store.write_part(
            4, 1, "state-0", CheckpointFile(Meanwhile(lambda: write_parts(store, 4)), (0,))
        )
    assert (root / "step-0000000004-g000001" / "state-0").read_bytes()[:3] == bytes([4, 1, 0])


def test_two_writers_of_one_checkpoint(store: DirectoryStore, root: Path) -> None:
    """A commit fails if another writer replaced one of its parts.

    The commit of a writer whose parts are all unchanged succeeds.
    """
    first = write_parts(store, 4)
    second = [store.write_part(4, 1, "state-0", CheckpointFile([b"x" * 200], (0,)))]
    with pytest.raises(CheckpointError, match="checksum of state-0 differs"):
        store.commit(with_files(4, first))
    second.append(store.write_part(4, 1, "state-1", CheckpointFile([b"y" * 200], (1,))))
    assert not store.commit(with_files(4, tuple(second))).existed
    found = store.newest()
    assert found.checkpoint
    assert (found.passed_over, found.checkpoint.manifest.files) == ((), tuple(second))
    assert store.commit(with_files(4, first)).existed
    names = {path.name for path in (root / "step-0000000004-g000001").iterdir()}
    assert names == {"manifest.json", "state-0", "state-1"}


def test_a_commit_over_one_that_is_damaged(store: DirectoryStore, root: Path) -> None:
    """A commit replaces a damaged checkpoint of the same step, even if another writer wrote it."""
    put_parts(store, 4)
    path = root / "step-0000000004-g000001"
    (path / "state-0").write_bytes(bytes(200))
    (path / "mine").write_bytes(b"mine")
    entry = summed([b"mine"]).entry("mine", (0,))
    assert not store.commit(with_files(4, (entry,))).existed
    assert newest_step(store) == 4


def test_what_is_being_written_survives_the_sweep_of_what_is_old(
    store: DirectoryStore, root: Path
) -> None:
    """Writes and prunes of older steps do not remove a part that a process is writing.

    They remove the unfinished directories of older steps.
    """
    (root / "step-0000000003-g000001").mkdir(parents=True)
    with writer(root, 0, 8) as process:
        put(store, 4)
        assert not (root / "step-0000000003-g000001").exists()
        write_parts(store, 3)
        put_parts(store, 5)
        assert not (root / "step-0000000003-g000001").exists()
        write_parts(store, 3)
        assert store.prune(Retention(last=1)) == ((4, 1),)
        assert not (root / "step-0000000003-g000001").exists()
        files = (finish(process),)
    store.commit(with_files(8, files))
    assert newest_step(store) == 8


@pytest.mark.parametrize(("limit", "size"), [(1000, 2000), (200, 100)], ids=["part", "manifest"])
def test_a_refused_part_or_manifest_leaves_the_others(root: Path, limit: int, size: int) -> None:
    """If the kernel refuses a write, the error has the reason; only the refused file is missing."""
    write_parts(DirectoryStore(root), 1, size=100)
    before = tree(root)
    script = """
import msgspec
limit, size = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    entry = store.write_part(1, 1, "state-2", CheckpointFile([b"x" * size], (2,)))
    store.commit(msgspec.structs.replace(manifest(1), files=(entry,)))
except CheckpointError as error:
    print(error)
"""
    message = run_child(script, root, limit, size)
    path = root / "step-0000000001-g000001"
    refused = f"write {path / 'state-2'}" if size > limit else f"commit {path}"
    assert f"cannot {refused}: " in message
    assert "File too large" in message
    assert "raise the limit on file sizes" in message
    written = {} if size > limit else {f"{path.name}/state-2": b"x" * size}
    assert tree(root) == {**before, **written}


def test_an_interrupted_part_leaves_the_others(store: DirectoryStore, root: Path) -> None:
    """An interrupt during a write removes the partial file and no other part."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    write_parts(store, 1)
    before = tree(root)
    with pytest.raises(KeyboardInterrupt):
        store.write_part(1, 1, "state-2", CheckpointFile(Meanwhile(interrupt), (2,)))
    assert tree(root) == before
