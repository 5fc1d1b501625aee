"""Memory for snapshots: the agent allocates it in threads, once, and refuses it if it is short."""

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

from rekindle.agent import memory_limits as buffer_memory
from rekindle.agent.memory_limits import create_buffer
from rekindle.agent.snapshots import buffers as snapshots
from rekindle.agent.snapshots.buffers import NodeSnapshots
from rekindle.agent.snapshots.replica_client import ReplicaClient
from rekindle.agent.snapshots.replica_server import ReplicaServer
from rekindle.agent.snapshots.replica_transport import Credentials
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.protocol import agent as p

KNOWN = Credentials("simulated", 0, "the secret")
WANTED = p.BufferRequest(rank=0, bytes=100_000, buffers=3)


class Node:
    """An agent's snapshots, and the messages for the coordinator."""

    def __init__(self, folder: Path) -> None:
        spec = spec_of(nodes=2, processes=1)
        self._others = set(memory_files())  # the files of earlier tests
        self.sent: list[p.Message] = []
        self.answers: list[tuple[p.BufferGrant, list[int]]] = []
        replica_server = ReplicaServer(spec, KNOWN, self.sent.append)
        self.snapshots = NodeSnapshots(
            spec,
            DirectoryStore(folder),
            self.sent.append,
            replica_server=replica_server,
            replica_client=ReplicaClient(KNOWN),
        )

    def ask(self, wanted: p.BufferRequest = WANTED) -> None:
        self.snapshots.room(wanted, lambda *answer: self.answers.append(answer))

    async def answered(self, count: int) -> list[tuple[p.BufferGrant, list[int]]]:
        """Wait until there are `count` answers, and return all answers."""
        await turn_until(lambda: len(self.answers) >= count, f"{count} answers")
        return self.answers

    def heard_of_none(self) -> bool:
        """Return whether a message reports that the node keeps no snapshot of the rank."""
        return any(isinstance(each, p.Snapshots) and each.kept == {0: ()} for each in self.sent)

    def memory(self) -> dict[int, int]:
        """Return the bytes of each buffer that this test made, by inode."""
        return {file: size for file, size in memory_files().items() if file not in self._others}

    def run(self, body: Coroutine[Any, Any, None]) -> None:
        async def main() -> None:
            try:
                await finished(body)
            finally:
                await self.snapshots.close()

        asyncio.run(main())


def memory_files() -> dict[int, int]:
    """Return the bytes of each buffer that this process has open, by inode."""
    files: dict[int, int] = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread closed it
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
    """During an allocation the agent answers other requests, and waits for no memory at the end.

    If the rank's next process asks for the same buffers, the agent allocates them only once.
    """
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
        await node.snapshots.finish()  # this does not wait for the allocation
        go_on.set()
        [_, (_, first), (_, second)] = await node.answered(3)
        assert first == second
        assert len(made) == len(first) == 3

    node.run(body())
    assert not node.memory()


def test_a_state_that_grows_gets_larger_buffers(node: Node) -> None:
    """If a state outgrows its buffers, the agent makes larger ones and frees the old ones."""

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
    """If the memory does not suffice for all buffers, the agent refuses them and frees the others.

    So the kernel does not kill a process for lack of memory.
    """
    enough = enough_for * 200_000
    left = lambda: enough - sum(node.memory().values())  # noqa: E731
    monkeypatch.setattr(buffer_memory, "available_bytes", left)

    async def body() -> None:
        node.ask()
        [(refused, fds)] = await node.answered(1)
        assert "not have memory for 3 snapshots of 100000 bytes: " in refused.error
        assert fds == []
        [message] = node.sent
        assert message == p.SnapshotRefused(rank=0, error=refused.error)
        assert not node.memory()
        monkeypatch.undo()
        assert len(await room_of(node.snapshots, WANTED)) == 3  # the reserved memory is free again

    node.run(body())


def test_what_others_were_promised_is_not_promised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two ranks ask at the same time, the agent does not reserve the same memory for both."""
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
    fds.append(create_buffer("third", 600_000))  # the simulated free memory is constant
    for fd in fds:
        os.close(fd)


def test_memory_whose_maker_fails_is_not_promised_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an allocation fails, for example without a free descriptor, its reservation ends."""
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
    """When the agent ends, it stops a running allocation and answers the request with an error."""
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
    """If a generation ends during the allocation for a replica, the next request gets the memory.

    The agent does not allocate it again.
    """
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
    """If the memory does not suffice for old and new buffers, the new ones wait for the old ones.

    The old buffers stay as long as a task reads them.
    """
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
