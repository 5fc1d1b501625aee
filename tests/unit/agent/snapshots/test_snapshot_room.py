"""Memory for snapshots: made while the agent goes on, once, and refused before it is missed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from jobs.driver import spec_of
from jobs.replicas import room_of
from waiting import finished, join, turn_until, wait_set

from rekindle.agent.snapshots import allocation as buffer_memory
from rekindle.agent.snapshots import buffers as snapshots
from rekindle.agent.snapshots.allocation import create_buffer
from rekindle.agent.snapshots.buffers import NodeSnapshots
from rekindle.agent.snapshots.replica_client import ReplicaClient
from rekindle.agent.snapshots.replica_server import ReplicaServer
from rekindle.agent.snapshots.replica_transport import Credentials
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.protocol import agent as p

KNOWN = Credentials("simulated", 0, "the secret")
WANTED = p.BufferRequest(rank=0, bytes=100_000, buffers=3)


class Node:
    """An agent's snapshots, and what the coordinator is told."""

    def __init__(self, folder: Path) -> None:
        spec = spec_of(nodes=2, processes=1)
        self._others = set(memory_files())  # of tests before this one
        self.told: list[p.Message] = []
        self.answers: list[tuple[p.BufferGrant, list[int]]] = []
        replica_server = ReplicaServer(spec, KNOWN, self.told.append)
        self.snapshots = NodeSnapshots(
            spec,
            DirectoryStore(folder),
            self.told.append,
            replica_server=replica_server,
            replica_client=ReplicaClient(KNOWN),
        )

    def ask(self, wanted: p.BufferRequest = WANTED) -> None:
        self.snapshots.room(wanted, lambda *answer: self.answers.append(answer))

    async def answered(self, count: int) -> list[tuple[p.BufferGrant, list[int]]]:
        """All answers, once there are so many."""
        await turn_until(lambda: len(self.answers) >= count, f"{count} answers")
        return self.answers

    def heard_of_none(self) -> bool:
        """Whether it was told that nothing is kept of the rank."""
        return any(isinstance(each, p.Snapshots) and each.kept == {0: ()} for each in self.told)

    def memory(self) -> dict[int, int]:
        """The buffers that have been made since, and the bytes of each."""
        return {file: size for file, size in memory_files().items() if file not in self._others}

    def run(self, body: Coroutine[Any, Any, None]) -> None:
        async def main() -> None:
            try:
                await finished(body)
            finally:
                await self.snapshots.close()

        asyncio.run(main())


def memory_files() -> dict[int, int]:
    """The buffers that this process has open: by their number, how many bytes are in each."""
    files: dict[int, int] = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has just closed it
            if "memfd:rekindle-" in str(link.readlink()):
                file = link.stat()
                files[file.st_ino] = file.st_size
    return files


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_agent_goes_on_while_memory_is_made(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that dies meanwhile and asks again gets what was made for it, and nothing twice."""
    go_on = threading.Event()
    made: list[str] = []

    def slowly(name: str, data_bytes: int, stop: threading.Event) -> int:
        made.append(name)
        wait_set(go_on)
        return create_buffer(name, data_bytes, stop)

    monkeypatch.setattr(snapshots, "create_buffer", slowly)

    async def body() -> None:
        node.ask()
        await turn_until(lambda: len(made) == 3, "three buffers")
        node.ask()  # the next process of the rank
        node.snapshots.room(
            p.BufferRequest(rank=0, bytes=0, buffers=0), lambda *a: node.answers.append(a)
        )
        [(none, _)] = node.answers
        assert "no snapshot of rank 0" in none.error
        await node.snapshots.finish()  # nothing that has to be done waits for memory
        go_on.set()
        [_, (_, first), (_, second)] = await node.answered(3)
        assert first == second
        assert len(made) == len(first) == 3

    node.run(body())
    assert not node.memory()


def test_a_state_that_grows_gets_larger_buffers(node: Node) -> None:
    """Those that are too small are let go."""

    async def body() -> None:
        small = await room_of(node.snapshots, WANTED)
        assert await room_of(node.snapshots, WANTED) == small
        large = await room_of(node.snapshots, p.BufferRequest(rank=0, bytes=900_000, buffers=3))
        assert os.fstat(large[0]).st_size >= 900_000
        await node.snapshots.finish()
        assert len(node.memory()) == 3

    node.run(body())


@pytest.mark.parametrize("enough_for", [0, 1, 2])
def test_memory_that_is_not_to_be_had(
    node: Node, monkeypatch: pytest.MonkeyPatch, enough_for: int
) -> None:
    """It is refused before the kernel has to kill somebody, whichever buffer finds it missing."""
    enough = enough_for * 200_000
    left = lambda: enough - sum(node.memory().values())  # noqa: E731
    monkeypatch.setattr(buffer_memory, "available_bytes", left)

    async def body() -> None:
        node.ask()
        [(refused, fds)] = await node.answered(1)
        assert "not have memory for 3 snapshots of 100000 bytes: " in refused.error
        assert fds == []
        [told] = node.told
        assert told == p.SnapshotRefused(rank=0, error=refused.error)
        assert not node.memory()
        monkeypatch.undo()
        assert len(await room_of(node.snapshots, WANTED)) == 3  # what was promised is free again

    node.run(body())


def test_what_others_were_promised_is_not_promised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks ask at the same time, before the memory of any is taken."""
    monkeypatch.setattr(buffer_memory, "available_bytes", lambda: 1_000_000)
    begun, go_on = threading.Event(), threading.Event()
    write = os.pwrite

    def slowly(fd: int, data: bytes, at: int) -> int:
        begun.set()
        wait_set(go_on)
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", slowly)
    fds: list[int] = []
    first = threading.Thread(target=lambda: fds.append(create_buffer("first", 600_000)))
    first.start()
    try:
        wait_set(begun)
        with pytest.raises(OSError, match="has only 395904 bytes left"):
            create_buffer("second", 600_000)
    finally:
        go_on.set()
        join(first)
    monkeypatch.setattr(os, "pwrite", write)
    fds.append(create_buffer("third", 600_000))  # of this million nothing is taken
    for fd in fds:
        os.close(fd)


def test_memory_whose_maker_fails_is_not_promised_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left to be had, say."""
    monkeypatch.setattr(buffer_memory, "available_bytes", lambda: 1_000_000)

    def fail(name: str) -> int:
        raise OSError(errno.EMFILE, name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", fail)
        for _ in range(3):
            with pytest.raises(OSError, match="rekindle-first"):
                create_buffer("first", 600_000)
    os.close(create_buffer("second", 600_000))


def test_an_agent_that_ends_does_not_wait_for_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being made is given up; whoever waits is told."""
    begun, write = threading.Event(), os.pwrite

    def slowly(fd: int, data: bytes, at: int) -> int:
        begun.set()
        wait_set(node.snapshots._closing)
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", slowly)

    async def body() -> None:
        node.ask(p.BufferRequest(rank=0, bytes=50_000_000, buffers=3))
        await asyncio.to_thread(wait_set, begun)

    node.run(body())
    [(refused, _)] = node.answers
    assert "the agent does not need this buffer any longer" in refused.error
    assert not node.memory()


def test_a_fetch_that_is_broken_off_leaves_its_memory_to_the_next(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation ends while the memory for a replica's copy is made."""
    begun, go_on = threading.Event(), threading.Event()

    def slowly(name: str, data_bytes: int, stop: threading.Event) -> int:
        begun.set()
        wait_set(go_on)
        return create_buffer(name, data_bytes, stop)

    monkeypatch.setattr(snapshots, "create_buffer", slowly)

    async def body() -> None:
        fetch = asyncio.ensure_future(node.snapshots._have(WANTED, WANTED.bytes))
        await asyncio.to_thread(wait_set, begun)
        fetch.cancel()
        await asyncio.wait([fetch])
        go_on.set()
        node.ask()
        [(_, fds)] = await node.answered(1)
        assert len(fds) == len(node.memory()) == 3

    node.run(body())
    assert not node.memory()


def test_old_buffers_that_are_still_read_are_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is not memory enough for both: the new ones are made when the old ones are gone."""
    enough = 4_000_000
    left = lambda: enough - sum(node.memory().values())  # noqa: E731
    monkeypatch.setattr(buffer_memory, "available_bytes", left)

    async def body() -> None:
        await room_of(node.snapshots, p.BufferRequest(rank=0, bytes=600_000, buffers=3))
        reads = asyncio.Event()
        node.snapshots._start(_until(reads))  # as an upload does
        node.ask(p.BufferRequest(rank=0, bytes=700_000, buffers=3))
        await turn_until(node.heard_of_none, "a message that nothing is kept")
        assert not node.answers
        reads.set()
        [(answer, fds)] = await node.answered(1)
        assert (answer.error, len(fds)) == ("", 3)

    node.run(body())


async def _until(event: asyncio.Event) -> None:
    await event.wait()
