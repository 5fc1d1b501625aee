"""Replica servers over real sockets: hostile callers, torn streams and damaged replicas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct

import msgspec
import pytest
from jobs.driver import spec_of
from jobs.replicas import (
    CONTENT,
    KNOWN,
    MADE_IN,
    Kept,
    buffer_of,
    empty_buffer,
    form_of,
    memory,
    run,
    served,
)

from rekindle.agent.snapshots import replica_transport
from rekindle.agent.snapshots.replica_server import ReplicaServer, fetch, put
from rekindle.agent.snapshots.replica_transport import Credentials, Fetch, Put, ReplicaConnection
from rekindle.errors import CheckpointError, CorruptError
from rekindle.names import LOOPBACK
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.states import StateId


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (Credentials("simulated", 0, "another secret"), "closed the connection|reset"),
        (
            Credentials("simulated", 1, "the secret"),
            r"the caller has .*, 1\), this agent has .*, 0\)",
        ),
        (Credentials("other", 0, "the secret"), r"the caller has \(job, attempt\) \('other', 0\)"),
    ],
    ids=["secret", "attempt", "job"],
)
def test_others_are_refused(known: Credentials, text: str) -> None:
    """The server refuses callers of another job or attempt.

    A caller without the secret gets no answer.
    """

    async def body(kept: Kept) -> None:
        await kept.put(5)
        with pytest.raises(CheckpointError, match=text):
            await kept.fetch(5, known=known)
        with pytest.raises(CheckpointError, match=text):
            await kept.put(10, known=known)
        assert kept.steps == {2: (5,)}
        await served(kept)

    run(body)


def test_a_replica_server_that_is_none() -> None:
    """A sender refuses a replica server that does not know the job's secret."""

    async def body(kept: Kept) -> None:
        wrong = ReplicaServer(
            spec_of(nodes=2, processes=2), Credentials("simulated", 0, "guess"), print
        )

        async def believe(connection: ReplicaConnection) -> Fetch:
            await connection.meet()
            await connection._receive(36)
            return Fetch(job_id="simulated", attempt=0, rank=2, state=(5, 1))

        at = protocol.ReplicaAddress(host=LOOPBACK, port=wrong.listen(LOOPBACK))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rekindle.agent.snapshots.replica_server._first", believe)
            error = pytest.raises(CheckpointError, match="does not know the job's secret")
            with buffer_of(CONTENT, 5) as buffer, error:
                await put(at, KNOWN, buffer, rank=2, form=form_of(1, 0))
        await wrong.close()

    run(body)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        bytes(32) + struct.pack("!I32s", 1 << 31, bytes(32)),
        bytes(32) + struct.pack("!I32s", 4096, bytes(32)) + bytes(100),
        os.urandom(100_000),
    ],
    ids=["nothing", "http", "long", "short", "noise"],
)
def test_garbage(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server disconnects callers that send garbage, allocates nothing and serves others."""
    monkeypatch.setattr(ReplicaConnection, "silence_s", 0.2)

    async def body(kept: Kept) -> None:
        loop = asyncio.get_running_loop()
        callers = []
        for _ in range(20):
            connection = socket.socket()
            connection.setblocking(False)
            callers.append(connection)
            await loop.sock_connect(connection, (kept.at.host, kept.at.port))
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(connection, data)
        await served(kept)
        for connection in callers:
            with connection, contextlib.suppress(ConnectionError):
                while await loop.sock_recv(connection, 4096):
                    pass
        assert len(memory()) == 1

    run(body)


def request_of(**changes: object) -> Put:
    fields = {
        "job_id": "simulated",
        "attempt": 0,
        "rank": 2,
        "generation": 1,
        "since": 0,
        "state": (5, 1),
    }
    return Put(**fields | {"bytes": 50_000, "checksum": "none"} | changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bytes": 1 << 60}, "does not have memory for a replica of 1152921504606846976 bytes"),
        ({"rank": 4}, "there is no rank 4"),
        ({"rank": -1}, "there is no rank -1"),
    ],
)
def test_what_cannot_be_kept(changes: dict[str, int], text: str) -> None:
    """The server refuses an unknown rank and a too large replica before the sender sends a byte."""

    async def body(kept: Kept) -> None:
        connection = await kept.connection()
        await connection.say(request_of(**changes))
        assert text in (await connection.receive_message(replica_transport.ANSWERS)).error
        connection._socket.close()
        assert kept.steps.get(2, ()) == ()
        await served(kept)

    run(body)


@pytest.mark.parametrize(
    "changes", [{"bytes": 0}, {"bytes": -1}, {"state": (-1, 1)}, {"attempt": "0"}]
)
def test_requests_that_make_no_sense(changes: dict[str, object]) -> None:
    """The server ends the connection at an invalid request, even if the caller knows the secret."""

    async def body(kept: Kept) -> None:
        connection = await kept.connection()
        await connection.say(msgspec.convert(msgspec.to_builtins(request_of()) | changes, _Any))
        with pytest.raises(ConnectionError):
            await connection.receive_message(replica_transport.ANSWERS)
        connection._socket.close()
        await served(kept)

    run(body)


class _Any(msgspec.Struct, tag="put", tag_field="type"):
    """A request with any values."""

    job_id: object
    attempt: object
    rank: object
    generation: object
    since: object
    state: object
    bytes: object
    checksum: object


@pytest.mark.parametrize("ends", ["cut", "silent"])
def test_a_torn_stream(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server drops a partial replica, keeps the earlier ones and accepts the next one."""
    monkeypatch.setattr(ReplicaConnection, "silence_s", 0.3)

    async def body(kept: Kept) -> None:
        await kept.put(5)
        await kept.put(10)
        connection = await kept.connection()
        await connection.say(request_of(state=(15, 1)))
        assert (await connection.receive_message(replica_transport.ANSWERS)).bytes == 50_000
        await connection.send(memoryview(CONTENT)[:20_000])
        if ends == "cut":
            connection._socket.close()
        assert await kept.fetch(10) == CONTENT  # waits until the server gives up the torn one
        assert kept.steps == {2: (5, 10)}
        connection._socket.close()
        await kept.put(15)
        assert kept.steps == {2: (10, 15)}
        assert len(memory()) == 3

    run(body)


def test_other_bytes_than_were_sealed() -> None:
    """The server refuses bytes that do not match the seal's checksum, with an error."""

    async def body(kept: Kept) -> None:
        connection = await kept.connection()
        await connection.say(request_of())
        await connection.receive_message(replica_transport.ANSWERS)
        await connection.send(memoryview(CONTENT))
        assert (
            "the received bytes have checksum xxh3_128 of blocks:"
            in (await connection.receive_message(replica_transport.ANSWERS)).error
        )
        connection._socket.close()
        assert kept.steps == {2: ()}

    run(body)


def test_a_copy_that_was_damaged() -> None:
    """The seal comes from the writer of the snapshot, so that a fetch detects a damaged replica."""

    async def body(kept: Kept) -> None:
        await kept.put(5)
        [copy] = kept.server._copies[2]
        copy.buffer.data[1000] ^= 0x10
        with pytest.raises(CorruptError, match="the replica of rank 2 after step 5 has checksum"):
            await kept.fetch(5)

    run(body)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_fetch_that_is_broken_off(damaged: bool) -> None:
    """A fetch cancelled at any point leaves either no snapshot or a complete, settled one."""
    content = CONTENT * 40  # the transfer takes many turns

    async def body(kept: Kept) -> None:
        await kept.put(5, content)
        if damaged:
            [copy] = kept.server._copies[2]
            copy.buffer.data[len(content) - 1] ^= 0x10
        turns = 0
        while not await broken_off(kept, len(content), turns):
            turns += 1
        assert turns > 10

    async def broken_off(kept: Kept, size: int, turns: int) -> bool:
        with empty_buffer(size) as buffer:

            async def make_room(size: int) -> SnapshotBuffer:
                return buffer

            work = fetch(kept.at, KNOWN, make_room, rank=2, state=StateId(5, MADE_IN))
            task = asyncio.ensure_future(work)
            for _ in range(turns):
                await asyncio.sleep(0)
                if task.done():
                    break
            ended = not task.cancel()
            await asyncio.wait([task])
            assert buffer.state is None or (not damaged and buffer.is_released)
            if buffer.state is not None:
                buffer.verify()
            return ended

    run(body)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a replica server has ended or does not answer, the error has its address."""
    monkeypatch.setattr(ReplicaConnection, "silence_s", 0.2)

    async def body(kept: Kept) -> None:
        with socket.create_server((LOOPBACK, 0)) as deaf:
            kept.at = protocol.ReplicaAddress(host=LOOPBACK, port=deaf.getsockname()[1])
            with pytest.raises(CheckpointError, match=f"{kept.at.port} does not answer"):
                await kept.fetch(5)
        with pytest.raises(CheckpointError, match=rf"{kept.at.port}: .*failed"):
            await kept.put(5)

    run(body)
