"""Depots over real sockets: what is kept, what is given back, and callers that mean no good."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from jobs.driver import spec_of

from rekindle.errors import CheckpointError, CorruptError, StaleError
from rekindle.names import LOOPBACK
from rekindle.runtime import depot_line, protocol
from rekindle.runtime.depot import Depot, fetch, put
from rekindle.runtime.depot_line import Answer, Fetch, Line, Pass, Put
from rekindle.runtime.snapshot import SnapshotBuffer

KNOWN = Pass("pretended", 0, "the secret")
CONTENT = os.urandom(50_000)
MEMORY = "memfd:rekindle-pretended-copy"


def form_of(generation: int, step: int) -> protocol.Form:
    """A generation that went on from a step."""
    return protocol.Form(
        generation=generation,
        step=step,
        world_size=4,
        store_host="",
        store_port=0,
        ranks={},
        plan={},
    )


class Kept:
    """A depot that listens, and what it has told of."""

    def __init__(self) -> None:
        self.told: list[dict[int, tuple[int, ...]]] = []
        self.depot = Depot(
            spec_of(nodes=2, processes=2), KNOWN, lambda message: self.told.append(message.steps)
        )
        self.at = protocol.Depot(host=LOOPBACK, port=self.depot.listen(LOOPBACK))

    async def put(
        self,
        step: int,
        content: bytes = CONTENT,
        *,
        rank: int = 2,
        form: protocol.Form | None = None,
        known: Pass = KNOWN,
    ) -> None:
        with buffer_of(content, step) as buffer:
            await put(self.at, known, buffer, rank=rank, form=form or form_of(1, 0))

    async def fetch(self, step: int, *, rank: int = 2, known: Pass = KNOWN) -> bytes:
        with empty_buffer(200_000_000 if rank == 3 else 60_000) as buffer:

            async def make_room(size: int) -> SnapshotBuffer:
                return buffer

            try:
                await fetch(self.at, known, make_room, rank=rank, step=step)
            except BaseException:
                assert buffer.step is None
                raise
            assert (buffer.step, buffer.is_settled) == (step, True)
            buffer.verify()
            with buffer.file as file:
                return bytes(file)

    async def line(self, known: Pass = KNOWN) -> Line:
        """A caller of our own."""
        loop = asyncio.get_running_loop()
        connection = socket.socket()
        connection.setblocking(False)
        await loop.sock_connect(connection, (self.at.host, self.at.port))
        line = Line(connection, known.secret, depot=False)
        await line.meet()
        return line


@contextlib.contextmanager
def empty_buffer(size: int) -> Iterator[SnapshotBuffer]:
    fd = SnapshotBuffer.create("test", size)
    buffer = SnapshotBuffer(fd)
    try:
        yield buffer
    finally:
        buffer.close()
        os.close(fd)


@contextlib.contextmanager
def buffer_of(content: bytes, step: int) -> Iterator[SnapshotBuffer]:
    """A sealed snapshot."""
    with empty_buffer(len(content) + 100) as buffer:
        buffer.data[: len(content)] = content
        buffer.commit(step, len(content))
        buffer.seal()
        yield buffer


def memory() -> list[Path]:
    """The copies' memory of this process; each is open twice."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if MEMORY in str(link.readlink()):
                found.append(link)
    return list({link.stat().st_ino: link for link in found}.values())


def run(body: Callable[[Kept], Awaitable[None]]) -> Kept:
    """Do it with a depot, which leaves nothing behind."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Kept]:
        kept = Kept()
        try:
            yield kept
        finally:
            await kept.depot.close()

    async def main() -> Kept:
        async with opened() as kept:
            await asyncio.wait_for(body(kept), 60)
        return kept

    files = len(list(Path("/proc/self/fd").iterdir()))
    kept = asyncio.run(main())
    assert memory() == []
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    return kept


async def served(kept: Kept) -> None:
    """Whatever came before, the depot keeps and gives."""
    await kept.put(77, rank=1)
    assert await kept.fetch(77, rank=1) == CONTENT


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
        assert kept.depot.steps == {2: (35, 40)}
        await kept.put(10, contents[10])
        for step in (35, 40):
            assert await kept.fetch(step) == contents[step]
        with pytest.raises(CheckpointError, match=r"no copy of rank 2 after step 30.*\[35, 40\]"):
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
            job_id="pretended",
            attempt=0,
            rank=2,
            generation=9,
            since=5,
            step=5,
            bytes=len(CONTENT),
            checksum=checksum,
        )
        await line.say(request)
        assert await line.hear(depot_line.ANSWERS) == Answer()
        line._socket.close()
        kept.depot.forget_after(9, 4)  # it was sent for this generation, too
        assert kept.depot.steps == {2: (5,)}
        await kept.put(5, b"another one", form=form_of(9, 5))
        assert await kept.fetch(5) == b"another one"
        assert kept.depot.steps == {2: (5,)}

    run(body)


def test_steps_that_are_done_again_are_forgotten() -> None:
    """Those of earlier generations; and what of them is still on its way is not kept."""

    async def body(kept: Kept) -> None:
        await kept.put(5)
        await kept.put(10)
        kept.depot.forget_after(2, 5)
        assert kept.depot.steps == {2: (5,)}
        with pytest.raises(StaleError):
            await kept.put(10)
        await kept.put(10, b"the new one", form=form_of(2, 5))
        kept.depot.forget_after(2, 5)  # the order came late: the node was faster
        assert await kept.fetch(10) == b"the new one"

    assert run(body).told == [{2: (5,)}, {2: (5, 10)}, {2: (5,)}, {2: (5, 10)}]


def test_a_node_that_is_ahead() -> None:
    """What it sends is of a generation that the depot's own node has not been told of yet."""

    async def body(kept: Kept) -> None:
        for step in (5, 10, 15):
            await kept.put(step)
        await kept.put(5, form=form_of(2, 5))
        assert kept.depot.steps == {2: (5,)}
        kept.depot.forget_after(2, 5)
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
        loop = asyncio.get_running_loop()
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            while True:
                before = loop.time()
                await asyncio.sleep(0.001)
                longest = max(longest, loop.time() - before)

        with buffer_of(content, 5) as buffer, empty_buffer(len(content)) as back:
            watching = asyncio.create_task(watch())

            async def make_room(size: int) -> SnapshotBuffer:
                return back

            await put(kept.at, KNOWN, buffer, rank=3, form=form_of(1, 0))
            await fetch(kept.at, KNOWN, make_room, rank=3, step=5)
            watching.cancel()
            assert bytes(back.file) == content
        assert longest < 1.0  # of both ends together, on a busy machine

    run(body)


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (Pass("pretended", 0, "another secret"), "line was closed|reset"),
        (Pass("pretended", 1, "the secret"), r"job and attempt are .*, 1\), ours are .*, 0\)"),
        (Pass("other", 0, "the secret"), r"job and attempt are \('other', 0\)"),
    ],
    ids=["secret", "attempt", "job"],
)
def test_others_are_refused(known: Pass, told: str) -> None:
    """Who does not know the secret learns nothing at all."""

    async def body(kept: Kept) -> None:
        await kept.put(5)
        with pytest.raises(CheckpointError, match=told):
            await kept.fetch(5, known=known)
        with pytest.raises(CheckpointError, match=told):
            await kept.put(10, known=known)
        assert kept.depot.steps == {2: (5,)}
        await served(kept)

    run(body)


def test_a_depot_that_is_none() -> None:
    """One that does not know the secret cannot give us a state."""

    async def body(kept: Kept) -> None:
        wrong = Depot(spec_of(nodes=2, processes=2), Pass("pretended", 0, "guess"), print)

        async def believe(line: Line) -> Fetch:
            await line.meet()
            await line._receive(36)
            return Fetch(job_id="pretended", attempt=0, rank=2, step=5)

        at = protocol.Depot(host=LOOPBACK, port=wrong.listen(LOOPBACK))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rekindle.runtime.depot._first", believe)
            error = pytest.raises(CheckpointError, match="does not know the job's secret")
            with buffer_of(CONTENT, 5) as buffer, error:
                await put(at, KNOWN, buffer, rank=2, form=form_of(1, 0))
        await wrong.close()

    run(body)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        bytes(32) + struct.pack("!I32s", 1 << 31, bytes(32)),
        bytes(32) + struct.pack("!I32s", 4096, bytes(32)) + bytes(100),
        os.urandom(100_000),
    ],
    ids=["nothing", "http", "long", "short", "noise"],
)
def test_garbage(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs neither memory nor other callers' time, and is cut off."""
    monkeypatch.setattr(Line, "silence_s", 0.2)

    async def body(kept: Kept) -> None:
        loop = asyncio.get_running_loop()
        callers = []
        for _ in range(20):
            connection = socket.socket()
            connection.setblocking(False)
            callers.append(connection)
            await loop.sock_connect(connection, (kept.at.host, kept.at.port))
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(connection, said)
        await served(kept)
        for connection in callers:
            with connection, contextlib.suppress(ConnectionError):
                while await loop.sock_recv(connection, 4096):
                    pass
        assert len(memory()) == 1

    run(body)


def request_of(**changes: object) -> Put:
    fields = {
        "job_id": "pretended",
        "attempt": 0,
        "rank": 2,
        "generation": 1,
        "since": 0,
        "step": 5,
    }
    return Put(**fields | {"bytes": 50_000, "checksum": "none"} | changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bytes": 1 << 60}, "no memory for a copy of 1152921504606846976 bytes"),
        ({"rank": 4}, "there is no rank 4"),
        ({"rank": -1}, "there is no rank -1"),
    ],
)
def test_what_cannot_be_kept(changes: dict[str, int], told: str) -> None:
    """It is told, before a byte is sent."""

    async def body(kept: Kept) -> None:
        line = await kept.line()
        await line.say(request_of(**changes))
        assert told in (await line.hear(depot_line.ANSWERS)).error
        line._socket.close()
        assert kept.depot.steps.get(2, ()) == ()
        await served(kept)

    run(body)


@pytest.mark.parametrize("changes", [{"bytes": 0}, {"bytes": -1}, {"step": -1}, {"attempt": "0"}])
def test_requests_that_make_no_sense(changes: dict[str, object]) -> None:
    """They are no messages, even from one who knows the secret."""

    async def body(kept: Kept) -> None:
        line = await kept.line()
        await line.say(msgspec.convert(msgspec.to_builtins(request_of()) | changes, _Any))
        with pytest.raises(ConnectionError):
            await line.hear(depot_line.ANSWERS)
        line._socket.close()
        await served(kept)

    run(body)


class _Any(msgspec.Struct, tag="put", tag_field="type"):
    """A request with anything in it."""

    job_id: object
    attempt: object
    rank: object
    generation: object
    since: object
    step: object
    bytes: object
    checksum: object


@pytest.mark.parametrize("ends", ["cut", "silent"])
def test_a_torn_stream(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come so far is not kept; what was there before is, and the next one is."""
    monkeypatch.setattr(Line, "silence_s", 0.3)

    async def body(kept: Kept) -> None:
        await kept.put(5)
        await kept.put(10)
        line = await kept.line()
        await line.say(request_of(step=15))
        assert (await line.hear(depot_line.ANSWERS)).bytes == 50_000
        await line.send(memoryview(CONTENT)[:20_000])
        if ends == "cut":
            line._socket.close()
        assert await kept.fetch(10) == CONTENT  # waits until that one is given up
        assert kept.depot.steps == {2: (5, 10)}
        line._socket.close()
        await kept.put(15)
        assert kept.depot.steps == {2: (10, 15)}
        assert len(memory()) == 3

    run(body)


def test_other_bytes_than_were_sealed() -> None:
    """They are refused; the sender is told."""

    async def body(kept: Kept) -> None:
        line = await kept.line()
        await line.say(request_of())
        await line.hear(depot_line.ANSWERS)
        await line.send(memoryview(CONTENT))
        assert (
            "checksum of what arrived is xxh3_128:" in (await line.hear(depot_line.ANSWERS)).error
        )
        line._socket.close()
        assert kept.depot.steps == {2: ()}

    run(body)


def test_a_copy_that_was_damaged() -> None:
    """The seal came from its writer: whoever fetches it sees that."""

    async def body(kept: Kept) -> None:
        await kept.put(5)
        [copy] = kept.depot._copies[2]
        copy.buffer.data[1000] ^= 0x10
        with pytest.raises(CorruptError, match="copy of rank 2 after step 5: checksum is"):
            await kept.fetch(5)

    run(body)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A depot that is gone, or does not answer, is an error with its address."""
    monkeypatch.setattr(Line, "silence_s", 0.2)

    async def body(kept: Kept) -> None:
        with socket.create_server((LOOPBACK, 0)) as deaf:
            kept.at = protocol.Depot(host=LOOPBACK, port=deaf.getsockname()[1])
            with pytest.raises(CheckpointError, match=f"{kept.at.port} is silent"):
                await kept.fetch(5)
        with pytest.raises(CheckpointError, match=rf"{kept.at.port}: .*failed"):
            await kept.put(5)

    run(body)
