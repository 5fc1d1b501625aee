"""How an agent copies snapshots to its replica node by the plan, and fetches them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs.driver import spec_of
from jobs.replicas import room_of, steps_of
from waiting import bound_s, finished, turn_until

from rekindle.agent.snapshots.buffers import NodeSnapshots
from rekindle.agent.snapshots.replica_client import ReplicaClient
from rekindle.agent.snapshots.replica_server import ReplicaServer
from rekindle.agent.snapshots.replica_transport import Credentials, ReplicaConnection
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.names import LOOPBACK
from rekindle.protocol import agent as p
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.recovery.policy.plan import RankPlan, StateSource

KNOWN = Credentials("simulated", 0, "the secret")
SPEC = spec_of(nodes=2, processes=1)
CONTENT = os.urandom(30_000)
HEADER = b'{"__metadata__":{"data_position":"{}"}}'
FILE = len(HEADER).to_bytes(8, "little") + HEADER  # a snapshot file without tensors


class Node:
    """The snapshots and the replica server of one agent, and the messages that it sent."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[p.Message] = []
        self.replica_server = ReplicaServer(SPEC, KNOWN, self.sent.append)
        self.at = p.ReplicaAddress(host=LOOPBACK, port=self.replica_server.listen(LOOPBACK))
        self.snapshots = NodeSnapshots(
            SPEC,
            DirectoryStore(folder),
            self.sent.append,
            replica_server=self.replica_server,
            replica_client=ReplicaClient(KNOWN),
        )

    @property
    def steps(self) -> dict[int, tuple[int, ...]]:
        return steps_of(self.replica_server.kept)

    async def take(
        self, step: int, content: bytes = CONTENT, *, rank: int = 0, checkpoint: bool = False
    ) -> SnapshotBuffer:
        """Take a snapshot over the rank's oldest one; return the buffer that the agent has."""
        wanted = p.BufferRequest(rank=rank, bytes=len(content), buffers=3)
        fds = await room_of(self.snapshots, wanted)
        held = [buffer for _, buffer in self.snapshots._buffers[rank]]
        index = min(range(len(fds)), key=lambda i: held[i].recency)
        buffer = held[index]
        buffer.begin()
        buffer.data[: len(content)] = content
        buffer.commit((step, 1), len(content))
        taken = p.SnapshotTaken(
            rank=rank,
            generation=1,
            step=step,
            buffer=index,
            checkpoint=checkpoint,
            shards=1 if checkpoint else 2,
        )
        self.snapshots.taken(taken)
        return buffer

    async def fetch(self, step: int, *, rank: int = 0) -> tuple[str, list[int]]:
        """Request a rank's replica of a step; return the error and the steps in its buffers."""
        answers: asyncio.Queue[p.BufferGrant] = asyncio.Queue()
        wanted = p.BufferRequest(rank=rank, bytes=0, buffers=3, copy=(step, 1))
        self.snapshots.room(wanted, lambda answer, fds: answers.put_nowait(answer))
        answer = await answers.get()
        held = self.snapshots._buffers.get(rank, [])
        return answer.error, sorted(
            buffer.state[0] for _, buffer in held if buffer.state is not None
        )

    async def close(self) -> None:
        await self.snapshots.close()
        await self.replica_server.close()


def form(
    replica_node: p.ReplicaAddress | None = None,
    source: p.ReplicaAddress | None = None,
    **fields: int,
) -> p.FormGeneration:
    """Return an order: node 1 keeps replicas of rank 0 (`replica_node`) or has one (`source`)."""
    plan = RankPlan(
        source=StateSource.REPLICA if source else StateSource.SELF,
        node=1 if source else -1,
        replica_node=1 if replica_node else -1,
    )
    numbers = {"generation": 1, "world_size": 2, "step": 10, "shards": 2, "store_port": 1}
    place = replica_node or source
    return p.FormGeneration(
        **numbers | fields,
        store_host=LOOPBACK,
        ranks={0: 0},
        plan={0: plan},
        replica_addresses={1: place} if place else {},
    )


def run(folder: Path, body: Callable[[Node, Node], Coroutine[Any, Any, None]]) -> None:
    """Run the body with two nodes and check that they leave no open file descriptor."""

    async def main() -> None:
        nodes = Node(folder), Node(folder)
        try:
            await finished(body(*nodes))
        finally:
            for node in nodes:
                await node.close()

    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    asyncio.run(main())
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


class Deaf:
    """A replica server that accepts connections and sends nothing."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self.at = p.ReplicaAddress(host=LOOPBACK, port=listener.getsockname()[1])

    async def called(self) -> socket.socket:
        """Wait for a connection."""
        caller, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        return caller


@contextlib.contextmanager
def deaf() -> Iterator[Deaf]:
    """Open a replica server that accepts connections and sends nothing."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        yield Deaf(listener)


async def settled(buffer: SnapshotBuffer) -> None:
    await turn_until(lambda: buffer.is_released, "a settled snapshot")


def test_a_snapshot_is_settled_when_it_is_copied(tmp_path: Path) -> None:
    """A snapshot settles with its replica, or at its seal if the plan has no replica."""

    async def body(own: Node, other: Node) -> None:
        await settled(await own.take(5))
        assert other.steps == {}
        own.snapshots.formed(form(other.at))
        await settled(await own.take(10))
        assert other.steps == {0: (5, 10)}
        assert other.sent[-1] == p.Snapshots(kept={0: ((5, 1), (10, 1))}, copies=True)

    run(tmp_path, body)


def test_a_new_generation_copies_what_its_keeper_has_not(tmp_path: Path) -> None:
    """A new generation copies the valid snapshots that the replica node does not have.

    Both nodes remove snapshots after the generation's step.
    """

    async def body(own: Node, other: Node) -> None:
        own.snapshots.formed(form(other.at))
        for step in (5, 10, 15):
            await settled(await own.take(step))
        assert other.steps == {0: (10, 15)}
        for node, own_form in ((own, form(other.at, generation=2)), (other, form(generation=2))):
            node.snapshots.formed(own_form)
        assert steps_of(own.snapshots.kept) == {0: (5, 10)}
        assert other.steps == {0: (10,)}
        await own.snapshots.finish()
        assert other.steps == {0: (5, 10)}

    run(tmp_path, body)


def test_the_end_of_a_generation_breaks_copies_off(tmp_path: Path) -> None:
    """If a generation ends during a copy, the snapshot settles; the next generation copies it."""

    async def body(own: Node, other: Node) -> None:
        with deaf() as silent:
            own.snapshots.formed(form(silent.at))
            buffer = await own.take(5)
            with await silent.called():
                assert buffer.is_sealed
                assert not buffer.is_released
                own.snapshots.break_off()
                await settled(buffer)
        own.snapshots.formed(form(other.at, generation=2))
        await own.snapshots.finish()
        assert other.steps == {0: (5,)}

    run(tmp_path, body)


def test_a_replica_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The agent reports a failed replica node once and then skips it for a while.

    Ranks wait for one failed copy at most. The next generation copies the snapshots.
    """
    monkeypatch.setattr(ReplicaConnection, "silence_s", 0.2)

    async def body(own: Node, other: Node) -> None:
        with deaf() as silent:
            own.snapshots.formed(form(silent.at))
            for step in (5, 10, 15):
                await settled(await own.take(step))
            assert capfd.readouterr().err == (
                "rekindle: node 1 does not hold a replica of rank 0 after step 5: "
                f"the agent at {silent.at.host}:{silent.at.port} does not answer\n"
            )
        monkeypatch.setattr(ReplicaConnection, "silence_s", bound_s())
        own.snapshots.formed(form(other.at, generation=2, step=15))
        await own.snapshots.finish()
        assert other.steps == {0: (10, 15)}
        assert capfd.readouterr().err == ""

    run(tmp_path, body)


def test_a_copy_is_fetched_as_a_snapshot_of_the_ranks_own(tmp_path: Path) -> None:
    """A rank fetches its replica into a sealed, settled snapshot.

    A rank without buffers and a rank with its own snapshots can both do this.
    """

    async def body(own: Node, other: Node) -> None:
        for step in (5, 10):
            content = CONTENT + bytes([step])
            other.snapshots.formed(form(own.at))
            await settled(await other.take(step, content))
        assert own.steps == {0: (5, 10)}
        for node in (other, Node(tmp_path)):
            node.snapshots.formed(form(source=own.at))
            assert await node.fetch(10) == ("", [5, 10] if node is other else [10])
            assert node.sent[-1] == p.Snapshots(kept=node.snapshots.kept)
            assert max(node.snapshots.kept[0]) == (10, 1)
            [held] = [b for _, b in node.snapshots._buffers[0] if b.state == (10, 1)]
            assert held.is_released
            held.verify()
            with held.file as file:
                assert bytes(file) == CONTENT + bytes([10])
        await node.close()

    run(tmp_path, body)


def test_copies_that_cannot_be_fetched(tmp_path: Path) -> None:
    """A failed fetch gives the rank the reason; its other snapshots remain."""

    async def body(own: Node, other: Node) -> None:
        await settled(await own.take(5))
        error, held = await own.fetch(10)
        assert "does not fetch a replica in the current generation" in error
        own.snapshots.formed(form(source=other.at))
        error, held = await own.fetch(10)
        assert "no replica of rank 0 after step 10" in error
        assert held == [5]
        with deaf() as silent:
            own.snapshots.formed(form(source=silent.at, generation=2))
            asking = asyncio.create_task(own.fetch(10))
            with await silent.called():
                own.snapshots.break_off()
                assert "ended during the transfer" in (await asking)[0]
        assert steps_of(own.snapshots.kept) == {0: (5,)}

    run(tmp_path, body)


def test_final_checkpoint_from_a_copy(tmp_path: Path) -> None:
    """A replica node writes its shard of a final checkpoint from a replica.

    If it does not have the replica of that step, its message has the error.
    """
    order = p.WriteFinalCheckpoint(generation=1, step=5, shards={1: 0}, of=2)

    async def body(own: Node, other: Node) -> None:
        own.snapshots.formed(form(other.at))
        await settled(await own.take(5, FILE))
        other.snapshots.write_final_checkpoint(order)
        other.snapshots.write_final_checkpoint(
            p.WriteFinalCheckpoint(generation=1, step=6, shards={1: 0}, of=2)
        )
        await other.snapshots.finish()
        written, failed = (m for m in other.sent if isinstance(m, p.ShardWritten))
        assert (written.step, written.shard, written.error, written.final) == (5, 1, "", True)
        assert written.file is not None
        assert "no replica of rank 0 after step 6" in failed.error

    run(tmp_path, body)


def test_what_is_forgotten_of_a_whole_state(tmp_path: Path) -> None:
    """A generation with one shard removes only suspicious snapshots, not those after its step.

    An unsuspicious snapshot is a complete state, and may later be the only one.
    """

    async def body(own: Node, other: Node) -> None:
        whole = msgspec.structs.replace(form(other.at), generation=2, step=9, shards=1)
        for step in (5, 10):
            await settled(await own.take(step))
        own.snapshots.formed(whole)
        assert steps_of(own.snapshots.kept) == {0: (5, 10)}
        own.snapshots.formed(msgspec.structs.replace(whole, suspicions=((1, 7),)))
        assert steps_of(own.snapshots.kept) == {0: (5,)}

    run(tmp_path, body)


def test_final_checkpoint_that_are_clean(tmp_path: Path) -> None:
    """The agent writes the final checkpoint from the snapshot before the suspicious steps.

    The checkpoint has the step and the generation of that snapshot.
    """

    async def body(own: Node, other: Node) -> None:
        for step in (6, 8):
            await settled(await own.take(step, FILE))
        own.snapshots.write_final_checkpoint(
            p.WriteFinalCheckpoint(step=6, generation=1, suspicions=((2, 7),))
        )
        await own.snapshots.finish()
        (written,) = (m for m in own.sent if isinstance(m, p.CheckpointWritten))
        assert (written.step, written.generation, written.error) == (6, 1, "")

    run(tmp_path, body)


def test_a_checkpoint_that_is_forgotten_before_it_is_written(tmp_path: Path) -> None:
    """A checkpoint whose snapshot becomes suspicious before the write is not written.

    No message reports a failed write.
    """

    async def body(own: Node, other: Node) -> None:
        stored = threading.Event()
        own.snapshots._writes.submit(stored.wait)  # a slow store
        whole = msgspec.structs.replace(form(other.at), generation=2, step=5, shards=1)
        buffer = await own.take(9, FILE, checkpoint=True)
        await settled(buffer)
        own.snapshots.formed(msgspec.structs.replace(whole, suspicions=((1, 7),)))
        stored.set()
        await own.snapshots.finish()
        assert not [m for m in own.sent if isinstance(m, p.CheckpointWritten)]

    run(tmp_path, body)
