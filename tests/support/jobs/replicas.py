"""A replica server on real sockets, and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from waiting import finished

from jobs.driver import spec_of
from rekindle.agent.memory_limits import create_buffer
from rekindle.agent.snapshots.buffers import NodeSnapshots
from rekindle.agent.snapshots.replica_server import ReplicaServer, fetch, put
from rekindle.agent.snapshots.replica_transport import Credentials, ReplicaConnection
from rekindle.names import LOOPBACK
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.states import StateId

KNOWN = Credentials("simulated", 0, "the secret")
CONTENT = os.urandom(50_000)
MADE_IN = 1  # the generation of all snapshots
MEMORY = "memfd:rekindle-simulated-copy"


def form_of(generation: int, step: int) -> protocol.FormGeneration:
    """Return the plan of a generation that resumed at a step."""
    return protocol.FormGeneration(
        generation=generation,
        step=step,
        world_size=4,
        store_host="",
        store_port=0,
        ranks={},
        plan={},
    )


def steps_of(kept: dict[int, tuple[StateId, ...]]) -> dict[int, tuple[int, ...]]:
    """Return the steps of the kept snapshots of each rank."""
    assert {made for each in kept.values() for _, made in each} <= {MADE_IN}
    return {rank: tuple(step for step, _ in each) for rank, each in kept.items()}


class Kept:
    """A replica server that listens, and the messages that it reported."""

    def __init__(self) -> None:
        self.reported: list[dict[int, tuple[int, ...]]] = []
        self.server = ReplicaServer(
            spec_of(nodes=2, processes=2),
            KNOWN,
            lambda message: self.reported.append(steps_of(message.kept)),
        )
        self.at = protocol.ReplicaAddress(host=LOOPBACK, port=self.server.listen(LOOPBACK))

    @property
    def steps(self) -> dict[int, tuple[int, ...]]:
        return steps_of(self.server.kept)

    async def put(
        self,
        step: int,
        content: bytes = CONTENT,
        *,
        rank: int = 2,
        form: protocol.FormGeneration | None = None,
        known: Credentials = KNOWN,
    ) -> None:
        with buffer_of(content, step) as buffer:
            await put(self.at, known, buffer, rank=rank, form=form or form_of(1, 0))

    async def fetch(self, step: int, *, rank: int = 2, known: Credentials = KNOWN) -> bytes:
        with empty_buffer(200_000_000 if rank == 3 else 60_000) as buffer:

            async def make_room(size: int) -> SnapshotBuffer:
                return buffer

            try:
                await fetch(self.at, known, make_room, rank=rank, state=StateId(step, MADE_IN))
            except BaseException:
                assert buffer.state is None
                raise
            assert (buffer.state, buffer.is_released) == ((step, MADE_IN), True)
            buffer.verify()
            with buffer.file as file:
                return bytes(file)

    async def connection(self, known: Credentials = KNOWN) -> ReplicaConnection:
        """Return a connection of a client."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, (self.at.host, self.at.port))
        connection = ReplicaConnection(sock, known.secret, serves=False)
        await connection.meet()
        return connection


@contextlib.contextmanager
def empty_buffer(size: int) -> Iterator[SnapshotBuffer]:
    fd = create_buffer("test", size)
    buffer = SnapshotBuffer(fd)
    try:
        yield buffer
    finally:
        buffer.close()
        os.close(fd)


@contextlib.contextmanager
def buffer_of(content: bytes, step: int) -> Iterator[SnapshotBuffer]:
    """Yield a sealed snapshot."""
    with empty_buffer(len(content) + 100) as buffer:
        buffer.data[: len(content)] = content
        buffer.commit((step, MADE_IN), len(content))
        buffer.seal()
        yield buffer


def memory() -> list[Path]:
    """Return a file descriptor of each copy in the memory of this process. Each copy has two."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if MEMORY in str(link.readlink()):
                found.append(link)
    return list({link.stat().st_ino: link for link in found}.values())


def run(body: Callable[[Kept], Awaitable[None]]) -> Kept:
    """Run `body` with a replica server, and check that no memory or descriptor leaks."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Kept]:
        kept = Kept()
        try:
            yield kept
        finally:
            await kept.server.close()

    async def main() -> Kept:
        async with opened() as kept:
            await finished(body(kept))
        return kept

    gc.collect()  # closes the files of earlier tests now, not during this test
    files = len(list(Path("/proc/self/fd").iterdir()))
    kept = asyncio.run(main())
    assert memory() == []
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    return kept


async def served(kept: Kept) -> None:
    """Check that the replica server still stores and returns snapshots."""
    await kept.put(77, rank=1)
    assert await kept.fetch(77, rank=1) == CONTENT


async def room_of(snapshots: NodeSnapshots, wanted: protocol.BufferRequest) -> list[int]:
    """Return the descriptors of the buffers that a rank gets on a request for room."""
    answers: asyncio.Queue[tuple[protocol.BufferGrant, list[int]]] = asyncio.Queue()
    snapshots.room(wanted, lambda *answer: answers.put_nowait(answer))
    answer, fds = await answers.get()
    assert not answer.error
    return fds
