"""Replica servers over real sockets: the replicas that they keep and return."""

from __future__ import annotations

import asyncio
import os

import pytest
from jobs.replicas import (
    CONTENT,
    KNOWN,
    Kept,
    buffer_of,
    empty_buffer,
    form_of,
    memory,
    run,
)

from rekindle.agent.snapshots import replica_transport
from rekindle.agent.snapshots.replica_server import fetch, put
from rekindle.agent.snapshots.replica_transport import Put, ReplicaAnswer
from rekindle.errors import CheckpointError, StaleError
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.states import StateId


def test_a_copy_is_kept_and_given_back() -> None:
    """The server returns the bytes of a replica at each request."""

    async def body(kept: Kept) -> None:
        await kept.put(5)
        assert await kept.fetch(5) == CONTENT
        assert await kept.fetch(5) == CONTENT

    assert run(body).reported == [{2: (5,)}]


def test_the_two_newest_are_kept() -> None:
    """The server keeps the two newest replicas and uses the memory of three at most.

    Senders do not send older ones.
    """

    async def body(kept: Kept) -> None:
        contents = {step: os.urandom(1000 + step) for step in range(5, 45, 5)}
        for step, content in contents.items():
            await kept.put(step, content)
        assert kept.steps == {2: (35, 40)}
        await kept.put(10, contents[10])
        for step in (35, 40):
            assert await kept.fetch(step) == contents[step]
        with pytest.raises(CheckpointError, match=r"rank 2 after step 30 .*\(35, 1\), \(40, 1\)"):
            await kept.fetch(30)
        assert len(memory()) <= 3

    run(body)


def test_what_is_there_is_not_sent_again() -> None:
    """The server refuses a snapshot that it has; a different one of that step replaces it."""

    async def body(kept: Kept) -> None:
        await kept.put(5)
        connection = await kept.connection()
        with buffer_of(CONTENT, 5) as buffer:
            checksum = buffer.checksum
        request = Put(
            job_id="simulated",
            attempt=0,
            rank=2,
            generation=9,
            since=5,
            state=(5, 1),
            bytes=len(CONTENT),
            checksum=checksum,
        )
        await connection.say(request)
        assert await connection.receive_message(replica_transport.ANSWERS) == ReplicaAnswer()
        connection._socket.close()
        kept.server.formed(form_of(9, 4))  # the snapshot was also sent for this generation
        assert kept.steps == {2: (5,)}
        await kept.put(5, b"another one", form=form_of(9, 5))
        assert await kept.fetch(5) == b"another one"
        assert kept.steps == {2: (5,)}

    run(body)


def test_steps_that_are_done_again_are_forgotten() -> None:
    """A new generation removes replicas of earlier generations after its step.

    The server refuses such a replica if it arrives later.
    """

    async def body(kept: Kept) -> None:
        await kept.put(5)
        await kept.put(10)
        kept.server.formed(form_of(2, 5))
        assert kept.steps == {2: (5,)}
        with pytest.raises(StaleError):
            await kept.put(10)
        await kept.put(10, b"the new one", form=form_of(2, 5))
        kept.server.formed(form_of(2, 5))  # the order is late: the other node was faster
        assert await kept.fetch(10) == b"the new one"

    assert run(body).reported == [{2: (5,)}, {2: (5, 10)}, {2: (5,)}, {2: (5, 10)}]


def test_a_node_that_is_ahead() -> None:
    """A sender can be one generation ahead of the server's own node.

    Its message then removes the replicas after that generation's step.
    """

    async def body(kept: Kept) -> None:
        for step in (5, 10, 15):
            await kept.put(step)
        await kept.put(5, form=form_of(2, 5))
        assert kept.steps == {2: (5,)}
        kept.server.formed(form_of(2, 5))
        assert await kept.fetch(5) == CONTENT

    assert run(body).reported == [{2: (5,)}, {2: (5, 10)}, {2: (10, 15)}, {2: ()}, {2: (5,)}]


def test_many_ranks_at_once() -> None:
    """Each rank has its own replica; transfers of one rank run one after the other."""

    async def body(kept: Kept) -> None:
        contents = {(rank, step): os.urandom(20_000) for rank in range(4) for step in (5, 10)}
        await asyncio.gather(*(kept.put(s, c, rank=r) for (r, s), c in contents.items()))
        found = await asyncio.gather(
            *(kept.fetch(step, rank=rank) for rank, step in contents if rank < 3)
        )
        assert found == [content for (rank, _), content in contents.items() if rank < 3]

    run(body)


def test_a_big_one_holds_nobody_up() -> None:
    """The event loop continues to run other tasks during transfers of 100 MB in both directions."""
    content = os.urandom(100_000_000)

    async def body(kept: Kept) -> None:
        had = 0

        async def watch() -> None:
            nonlocal had
            while True:
                await asyncio.sleep(0)
                had += 1

        with buffer_of(content, 5) as buffer, empty_buffer(len(content)) as back:
            watching = asyncio.create_task(watch())

            async def make_room(size: int) -> SnapshotBuffer:
                return back

            await put(kept.at, KNOWN, buffer, rank=3, form=form_of(1, 0))
            await fetch(kept.at, KNOWN, make_room, rank=3, state=StateId(5, 1))
            watching.cancel()
            assert bytes(back.file) == content
        assert had > 100  # turns of the loop; the server sends a large replica in many pieces

    run(body)
