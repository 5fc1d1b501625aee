"""The S3 store: a later write completes the upload of a killed or failed writer."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import time
import tracemalloc
import weakref

import pytest
from stores import child, content, manifest, newest_step, put, with_files
from stores.places import S3Place
from stores.proxy import Answer, Proxy, Reset
from stores.servers import Server

from rekindle.checkpoints.location import S3Location, parse
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.s3 import client as s3_client
from rekindle.checkpoints.s3 import parallel_transfer as s3_transfer
from rekindle.checkpoints.s3.parallel_transfer import in_parallel
from rekindle.checkpoints.store import CheckpointFile, CheckpointStore
from rekindle.errors import CheckpointError

SIZE = 20 * 1000 + 7


@pytest.fixture
def through(
    proxy: Proxy, bucket: S3Place, rclone: Server, monkeypatch: pytest.MonkeyPatch
) -> CheckpointStore:
    """Return the store of `bucket` through the proxy, with parts of 1,000 bytes and no patience."""
    monkeypatch.setattr(s3_transfer, "PART", 1000)
    monkeypatch.setattr(s3_client, "PATIENCE_S", 0.0)
    where = parse(bucket.location)
    assert isinstance(where, S3Location)
    return open_store(rclone.location(where.prefix, port=proxy.port))


def part(seed: int = 0) -> CheckpointFile:
    data = random.Random(seed).randbytes(SIZE)
    return CheckpointFile([data[:1], b"", data[1:2500], data[2500:]], (0,))


def test_an_upload_goes_on_where_it_was_broken_off(
    through: CheckpointStore, proxy: Proxy, bucket: S3Place
) -> None:
    """A writer with the same bytes resumes a broken upload without sending its parts again.

    No unfinished upload remains.
    """
    proxy.rule = lambda request: (
        Reset() if request.is_part and "partNumber=12" in request.path else None
    )
    with pytest.raises(CheckpointError, match="the connection broke"):
        through.write_part(1, 1, "a", part())
    assert proxy.parts() >= 12
    assert len(bucket.unfinished_uploads()) == 1
    proxy.rule = lambda request: None
    entry = open_store(through.location).write_part(1, 1, "a", part())
    assert proxy.parts() <= 21 - 11
    assert bucket.unfinished_uploads() == []
    through.commit(with_files(1, (entry,)))
    checkpoint = through.newest().checkpoint
    assert checkpoint
    assert content(checkpoint) == {"a": b"".join(part().chunks)}
    assert proxy.parts() == 0
    assert through.write_part(1, 1, "a", part()) == entry
    assert proxy.parts() == 0


def test_other_bytes_do_not_go_on_with_an_upload(
    through: CheckpointStore, proxy: Proxy, bucket: S3Place
) -> None:
    """A writer with other bytes uploads its own object.

    A newer checkpoint removes the broken upload.
    """
    proxy.rule = lambda request: Reset() if "partNumber=9" in request.path else None
    with pytest.raises(CheckpointError):
        through.write_part(1, 1, "a", part(seed=1))
    proxy.rule = lambda request: None
    through.commit(with_files(1, (through.write_part(1, 1, "a", part(seed=2)),)))
    assert len(bucket.unfinished_uploads()) == 1
    put(through, 2)
    assert bucket.unfinished_uploads() == []
    found = through.find(1, 1)
    assert found
    assert content(found) == {"a": b"".join(part(seed=2).chunks)}


def test_an_answer_that_is_lost_does_not_matter(through: CheckpointStore, proxy: Proxy) -> None:
    """A writer recognises an upload that the server completed without an answer."""
    lost = Reset(passed_on=True)
    proxy.rule = lambda request: (
        lost if request.method == "POST" and "uploadId" in request.path else None
    )
    with pytest.raises(CheckpointError):
        through.write_part(1, 1, "a", part())
    proxy.rule = lambda request: None
    proxy.parts()
    through.write_part(1, 1, "a", part())
    assert proxy.parts() == 0


def test_uploads_that_cannot_be_listed_are_begun_anew(
    through: CheckpointStore, proxy: Proxy
) -> None:
    """If uploads cannot be listed, for lack of rights or support, a writer sends all parts."""
    proxy.rule = lambda request: (
        Answer(403, "AccessDenied")
        if request.method == "GET" and "uploads" in request.path
        else None
    )
    entry = through.write_part(1, 1, "a", part())
    assert proxy.parts() == 21
    assert through.commit(with_files(1, (entry,))).existed is False


def test_a_big_file_is_sent_and_proved_in_little_memory(bucket: S3Place) -> None:
    """An upload and a verification hold only a few blocks of a large file in memory."""
    store = bucket.open()
    data = memoryview(bytes(96 << 20))
    newest_step(store)  # imports all modules before the measurement
    tracemalloc.start()
    store.write(manifest(1), {"a": CheckpointFile([data], (0,))})
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    assert newest_step(bucket.open()) == 1
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written < 64 << 20
    assert read < 64 << 20


# A fork for each step imports boto3 only once. Small parts give many moments for SIGKILL.
KILLED = """
from rekindle.checkpoints.s3 import client as s3_client
from rekindle.checkpoints.s3 import parallel_transfer as s3_transfer
s3_transfer.PART = 50_000
store.keys()
print("ready", flush=True)
for line in sys.stdin:
    step = int(line)
    process = os.fork()
    if not process:
        store = open_store(sys.argv[1])
        store.write(manifest(step), parts(step % 256, 1_000_000))
        store.prune(Retention(last=2))
        os._exit(0)
    print(process, flush=True)
    print("finished" if os.wait()[1] == 0 else "killed", flush=True)
"""


def kill_often(bucket: S3Place, kills: int, seed: int) -> None:
    """Kill a writer many times; check the newest checkpoint each round and the final files."""
    lots, newest, killed, longest = random.Random(seed), -1, 0, 1.0
    store = bucket.open()
    with child(KILLED, bucket.location) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        while killed < kills:
            process.stdin.write(f"{newest + 1}\n")
            process.stdin.flush()
            writer, began = int(process.stdout.readline()), time.monotonic()
            time.sleep(lots.uniform(0, longest))
            kill(writer)
            finished = process.stdout.readline() == "finished\n"
            if finished:
                longest = min(longest, time.monotonic() - began)
            killed += not finished
            found = store.newest()
            step = found.checkpoint.manifest.step if found.checkpoint else -1
            assert step in ((newest + 1,) if finished else (newest, newest + 1))
            if found.checkpoint:
                assert all(set(data) == {step % 256} for data in content(found.checkpoint).values())
            newest = step
        process.stdin.close()
    put(store, newest + 2)  # newer than the last written step, which may be partial
    store.prune(Retention(last=1))
    assert bucket.names() == bucket.files(newest + 2)
    assert bucket.unfinished_uploads() == []


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def test_a_killed_writer_leaves_a_valid_checkpoint(bucket: S3Place) -> None:
    """SIGKILL at 20 random moments loses no checkpoint, and the next write succeeds."""
    kill_often(bucket, 20, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
def test_a_writer_killed_often_leaves_a_valid_checkpoint(bucket: S3Place, seed: int) -> None:
    """SIGKILL at 40 random moments in each of five stores loses no checkpoint."""
    kill_often(bucket, 40, seed=seed + 2)


class Item:
    """The argument of a request."""


def test_a_failure_holds_nothing() -> None:
    """A failed request frees its argument, the memory of a state, without a garbage collection."""
    item = Item()
    gone = weakref.ref(item)

    def fail(_: Item) -> None:
        raise CheckpointError("broken")

    gc.disable()
    try:
        with contextlib.suppress(CheckpointError):
            in_parallel(fail, [item])
        del item
        assert gone() is None
    finally:
        gc.enable()
