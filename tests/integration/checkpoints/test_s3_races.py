"""Races of two processes on the S3 store: one acts between two requests of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from stores import content, newest_step, put, with_files, write_parts
from stores.places import S3Place
from stores.proxy import Proxy, Request

from rekindle.checkpoints.pins import Pin
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.s3 import place
from rekindle.checkpoints.store import CheckpointFile, CheckpointStore
from rekindle.errors import CheckpointError


def before_request(
    proxy: Proxy, wanted: Callable[[Request], bool], act: Callable[[], None]
) -> None:
    """Run an action just before the first matching request reaches the server."""

    def rule(request: Request) -> None:
        if wanted(request):
            proxy.rule = lambda _: None
            act()

    proxy.rule = rule


def is_mark(method: str) -> Callable[[Request], bool]:
    return lambda request: request.method == method and ".abandoned" in request.path


def test_a_commit_before_what_is_left_over_is_abandoned(
    broken: CheckpointStore, proxy: Proxy, bucket: S3Place
) -> None:
    """A prune sees a commit just before its mark and keeps the committed checkpoint."""
    other = bucket.open()
    files = write_parts(other, 4)
    put(other, 9)
    files = write_parts(other, 4)  # the commit of step 9 removed the first ones
    before_request(
        proxy, is_mark("PUT"), lambda: results.append(other.commit(with_files(4, files)))
    )
    results: list[object] = []
    broken.prune(Retention(last=5))
    assert len(results) == 1
    assert broken.keys() == [(9, 1), (4, 1)]
    found = other.find(4, 1)
    assert found
    assert len(content(found)) == 2
    broken.prune(Retention(last=5))
    assert not [name for name in bucket.names() if "abandoned" in name]


def test_a_commit_while_what_is_left_over_is_removed(
    broken: CheckpointStore, proxy: Proxy, bucket: S3Place
) -> None:
    """A commit during the removal of its parts is refused."""
    other = bucket.open()
    put(other, 9)
    files = write_parts(other, 4)

    def commit() -> None:
        with pytest.raises(CheckpointError, match="another process removes it"):
            other.commit(with_files(4, files))
        refused.append(True)

    refused: list[bool] = []
    before_request(proxy, lambda request: request.method == "DELETE", commit)
    broken.prune(Retention(last=5))
    assert refused, [(each.method, each.path) for each in proxy.seen]
    assert bucket.files(4) == []
    assert newest_step(other) == 9


def test_a_commit_and_a_removal_that_both_give_way(
    broken: CheckpointStore, proxy: Proxy, bucket: S3Place
) -> None:
    """If a commit and a removal both give up, the commit fails and its writer removes the files."""
    put(bucket.open(), 9)
    files = write_parts(broken, 4)
    mark = "step-0000000004-g000001/.abandoned"

    def rule(request: Request) -> None:
        if request.method == "PUT" and "manifest" in request.path:
            bucket.put(mark, b"")
        elif request.method == "DELETE":
            bucket.delete(mark)
            proxy.rule = lambda _: None

    proxy.rule = rule
    with pytest.raises(CheckpointError, match="another process removes it"):
        broken.commit(with_files(4, files))
    assert bucket.files(4) == []


def test_two_that_remove_what_is_left_over(
    broken: CheckpointStore, proxy: Proxy, bucket: S3Place
) -> None:
    """If another process removes a pruner's mark, the pruner leaves the files to the next prune."""
    other = bucket.open()
    put(other, 9)
    write_parts(other, 4)
    marked = []

    def rule(request: Request) -> None:
        if marked and request.method == "GET":
            bucket.delete(marked.pop())
            proxy.rule = lambda _: None
        elif request.method == "PUT" and ".abandoned" in request.path:
            marked.append("step-0000000004-g000001/.abandoned")

    proxy.rule = rule
    broken.prune(Retention(last=5))
    assert len(bucket.files(4)) == 2
    broken.prune(Retention(last=5))
    assert bucket.files(4) == []


def test_a_mark_that_somebody_has_left(bucket: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit ignores the mark of a killed pruner after a while, and a later write removes it."""
    store = bucket.open()
    files = write_parts(store, 4)
    bucket.put("step-0000000004-g000001/.abandoned", b"")
    with pytest.raises(CheckpointError, match="another process removes it"):
        store.commit(with_files(4, files))
    monkeypatch.setattr(place, "ABANDONED_S", 0.0)
    store.commit(with_files(4, files))
    assert newest_step(bucket.open()) == 4
    put(store, 9)
    assert not [name for name in bucket.names() if "abandoned" in name]


def test_a_checkpoint_pinned_while_another_prunes(
    broken: CheckpointStore, proxy: Proxy, bucket: S3Place
) -> None:
    """A prune keeps the pin of a checkpoint that was written after the prune started."""
    other = bucket.open()
    for step in (1, 2):
        put(other, step)

    def write_and_pin() -> None:
        put(other, 3)
        assert other.pin(Pin((3, 1), "user"))

    before_request(proxy, lambda request: "state-1" in request.path, write_and_pin)
    assert broken.prune(Retention(last=1)) == ((1, 1),)
    assert other.pins() == [Pin((3, 1), "user")]


def test_a_pin_is_seen_before_the_manifest_goes(
    broken: CheckpointStore, proxy: Proxy, bucket: S3Place
) -> None:
    """A pin that is added after the first look at the pins stops the removal of the manifest.

    A pruner that is killed between two requests thus leaves the pinned checkpoint complete.
    """
    for step in (1, 2):
        put(broken, step)
    other = bucket.open()
    # The pruner has found no pin and reads the checkpoint that it will remove.
    before_request(
        proxy,
        lambda request: "GET" in request.method and "step-0000000001" in request.path,
        lambda: results.append(other.pin(Pin((1, 1), "user"))),
    )
    results: list[bool] = []
    assert broken.prune(Retention(last=1)) == ()
    assert results == [True]
    deleted = [each.path for each in proxy.seen if each.method == "DELETE"]
    assert not [path for path in deleted if "manifest" in path]


class Rereading(list[bytes]):
    """Chunks that have other bytes at the second iteration."""

    def __init__(self) -> None:
        super().__init__([b"good" * 100])
        self.asked = 0

    def __iter__(self) -> Iterator[bytes]:
        self.asked += 1
        yield b"good" * 100 if self.asked == 1 else b"baaD" * 100


def test_chunks_are_asked_for_once(bucket: S3Place) -> None:
    """A write iterates over the chunks once, so that it sends the bytes of the checksum."""
    store = bucket.open()
    entry = store.write_part(5, 1, "state", CheckpointFile(Rereading(), (0,)))
    store.commit(with_files(5, (entry,)))
    assert newest_step(bucket.open()) == 5


def test_a_save_costs_the_same_after_many(broken: CheckpointStore, proxy: Proxy) -> None:
    """The number of requests of a write does not grow with the number of older checkpoints."""
    counts = []
    for step in range(1, 9):
        before = len(proxy.seen)
        put(broken, step)
        counts.append(len(proxy.seen) - before)
    assert len(set(counts[2:])) == 1, counts
