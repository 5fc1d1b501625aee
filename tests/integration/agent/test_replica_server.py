"""Replica servers over real sockets: what is kept, and what is given back."""

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
from rekindle.agent.snapshots.replica_transport import Answer, Put
from rekindle.errors import CheckpointError, StaleError
from rekindle.protocol.snapshot_buffer import SnapshotBuffer


def test_a_copy_is_kept_and_given_back() -> None:
    """Byte by byte, as often as it is asked for."""

    async def body(kept: Kept) -> None:
        await kept.put(5)
        assert await kept.fetch(5) == CONTENT
        assert await kept.fetch(5) == CONTENT

    assert run(body).told == [{2: (5,)}]


def test_the_two_newest_are_kept() -> None:
    """In no more memory than they and one that comes need; older ones are not even sent."""

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
    """Unless it is another snapshot of that step, which then takes its place."""

    async def body(kept: Kept) -> None:
        await kept.put(5)
        line = await kept.line()
        with buffer_of(CONTENT, 5) as buffer:
            checksum = buffer.checksum
        request = Put(
            job_id="simulated",
            attempt=0,
            rank=2,
            generation=9,
            since=5,
            made=(5, 1),
            bytes=len(CONTENT),
            checksum=checksum,
        )
        await line.say(request)
        assert await line.hear(replica_transport.ANSWERS) == Answer()
        line._socket.close()
        kept.server.formed(form_of(9, 4))  # it was sent for this generation, too
        assert kept.steps == {2: (5,)}
        await kept.put(5, b"another one", form=form_of(9, 5))
        assert await kept.fetch(5) == b"another one"
        assert kept.steps == {2: (5,)}

    run(body)


def test_steps_that_are_done_again_are_forgotten() -> None:
    """Those of earlier generations; and what of them is still on its way is not kept."""

    async def body(kept: Kept) -> None:
        await kept.put(5)
        await kept.put(10)
        kept.server.formed(form_of(2, 5))
        assert kept.steps == {2: (5,)}
        with pytest.raises(StaleError):
            await kept.put(10)
        await kept.put(10, b"the new one", form=form_of(2, 5))
        kept.server.formed(form_of(2, 5))  # the order came late: the node was faster
        assert await kept.fetch(10) == b"the new one"

    assert run(body).told == [{2: (5,)}, {2: (5, 10)}, {2: (5,)}, {2: (5, 10)}]


def test_a_node_that_is_ahead() -> None:
    """It sends snapshots of a generation that the server's own node does not know yet."""

    async def body(kept: Kept) -> None:
        for step in (5, 10, 15):
            await kept.put(step)
        await kept.put(5, form=form_of(2, 5))
        assert kept.steps == {2: (5,)}
        kept.server.formed(form_of(2, 5))
        assert await kept.fetch(5) == CONTENT

    assert run(body).told == [{2: (5,)}, {2: (5, 10)}, {2: (10, 15)}, {2: ()}, {2: (5,)}]


def test_many_ranks_at_once() -> None:
    """Each has its own copy; those of one rank wait for each other."""

    async def body(kept: Kept) -> None:
        contents = {(rank, step): os.urandom(20_000) for rank in range(4) for step in (5, 10)}
        await asyncio.gather(*(kept.put(s, c, rank=r) for (r, s), c in contents.items()))
        found = await asyncio.gather(
            *(kept.fetch(step, rank=rank) for rank, step in contents if rank < 3)
        )
        assert found == [content for (rank, _), content in contents.items() if rank < 3]

    run(body)


def test_a_big_one_holds_nobody_up() -> None:
    """While 100 MB come and go, the loop has its turns."""
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
            await fetch(kept.at, KNOWN, make_room, rank=3, made=(5, 1))
            watching.cancel()
            assert bytes(back.file) == content
        assert had > 100  # turns; a big one is sent in many pieces

    run(body)
