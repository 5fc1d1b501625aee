"""Checkpoints that are due on a node: a slow store delays no rank and causes no long queue."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from jobs.driver import spec_of
from jobs.replicas import room_of
from waiting import finished, turn_until, turns, wait_set

from rekindle.agent.memory_limits import create_buffer
from rekindle.agent.snapshots import buffers as buffers_module
from rekindle.agent.snapshots.buffers import NodeSnapshots
from rekindle.agent.snapshots.replica_client import ReplicaClient
from rekindle.agent.snapshots.replica_server import ReplicaServer
from rekindle.agent.snapshots.replica_transport import Credentials
from rekindle.agent.threads import in_pool
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.retention import Retention
from rekindle.errors import CheckpointError
from rekindle.protocol import agent as p
from rekindle.protocol.snapshot_buffer import BUFFERS_OF_SHARD, SnapshotBuffer
from rekindle.rank.progress import RankPlace
from rekindle.states import StateId
from rekindle.training.torch.state.sharding import GivenValues
from rekindle.training.torch.state.snapshot import TorchSnapshotWriter

HEADER = b'{"__metadata__":{"metrics":"{\\"loss\\":0.5}"}}'
FILE = len(HEADER).to_bytes(8, "little") + HEADER  # a snapshot without tensors
KEEP_ALL, KEEP = Retention(), Retention(last=1)
KNOWN = Credentials("simulated", 0, "the secret")


class SlowStore(DirectoryStore):
    """A store whose writes wait until the test sets `free`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.free = threading.Event()

    def write(self, *arguments: Any) -> Any:
        wait_set(self.free)
        return super().write(*arguments)

    def write_part(self, *arguments: Any) -> Any:
        wait_set(self.free)
        return super().write_part(*arguments)


class Node:
    """An agent's snapshots, a rank that takes them, and the messages for the coordinator."""

    def __init__(self, folder: Path, *, shards: int, keep: Retention = KEEP_ALL) -> None:
        spec = msgspec.structs.replace(spec_of(nodes=2, processes=1), keep=keep)
        self.sent: list[p.Message] = []
        self.store = SlowStore(folder)
        self.shards = shards
        replica_server = ReplicaServer(spec, KNOWN, self.sent.append)
        self.snapshots = NodeSnapshots(
            spec,
            self.store,
            self.sent.append,
            replica_server=replica_server,
            replica_client=ReplicaClient(KNOWN),
        )

    def steps_of(self, kind: type[p.Message]) -> list[int]:
        return [message.step for message in self.sent if isinstance(message, kind)]

    async def take(self, step: int, *, checkpoint: bool = True) -> None:
        """Take a snapshot like SnapshotWriter, which never waits for the store."""
        count = 2 if self.shards == 1 else BUFFERS_OF_SHARD
        await room_of(self.snapshots, p.BufferRequest(rank=0, bytes=len(FILE), buffers=count))
        pair = self.snapshots._buffers[0]
        for index in sorted(range(count), key=lambda i: pair[i][1].recency)[:2]:
            buffer = SnapshotBuffer(pair[index][0])
            if buffer.lock(write=True):
                break
            buffer.close()
        else:
            raise AssertionError(f"no buffer for step {step}")
        buffer.begin()
        buffer.data[: len(FILE)] = FILE
        buffer.commit((step, 1), len(FILE))
        buffer.unlock()
        taken = p.SnapshotTaken(
            rank=0, generation=1, step=step, buffer=index, checkpoint=checkpoint, shards=self.shards
        )
        self.snapshots.taken(taken)
        await turn_until(lambda: buffer.is_released, "a settled snapshot")
        await turns()
        buffer.close()


def run(node: Node, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        try:
            await finished(body())
        finally:
            node.store.free.set()
            await node.snapshots.close()

    asyncio.run(main())


def test_a_whole_state_and_a_slow_store(tmp_path: Path) -> None:
    """With a slow store, the agent writes one checkpoint and queues only the newest other one.

    It leaves a queued checkpoint out when a newer snapshot overwrites it.
    """
    node = Node(tmp_path, shards=1)

    async def body() -> None:
        for step in (5, 10, 15):
            await node.take(step)
        assert node.steps_of(p.WriteLeftOut) == [10]
        node.store.free.set()
        await node.snapshots.finish()
        assert node.steps_of(p.CheckpointWritten) == [5, 15]
        node.store.free.clear()
        await node.take(20)
        await node.take(25)
        await node.take(26, checkpoint=False)
        node.store.free.set()
        await node.snapshots.finish()
        assert node.steps_of(p.CheckpointWritten) == [5, 15, 20]
        assert node.steps_of(p.WriteLeftOut) == [10, 25]

    run(node, body)


def test_shards_and_a_slow_store(tmp_path: Path) -> None:
    """The agent leaves a shard out if it has no such snapshot, or still writes the last shard."""
    node = Node(tmp_path, shards=2)

    def order(step: int) -> None:
        node.snapshots.write_parts(p.WriteShards(step=step, generation=1, shards={0: 0}, of=2))

    async def body() -> None:
        await node.take(5)
        order(5)
        for step in (10, 11, 12, 13):
            await node.take(step, checkpoint=step == 10)
        assert node.steps_of(p.ShardReady) == [5, 10]
        order(10)  # while the store has that of step 5
        assert node.steps_of(p.WriteLeftOut) == [10]
        node.store.free.set()
        await node.snapshots.finish()
        await node.take(15)
        order(15)
        order(16)  # no rank took this snapshot
        await node.snapshots.finish()
        assert node.steps_of(p.ShardWritten) == [5, 15]
        assert node.steps_of(p.WriteLeftOut) == [10, 16]

    run(node, body)


def test_what_is_amiss_with_pruning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If pruning fails, the coordinator learns it once, and the agent still writes checkpoints."""
    node = Node(tmp_path, shards=1, keep=KEEP)
    node.store.free.set()

    def fail(retention: Retention) -> tuple[()]:
        raise CheckpointError("the disk is read-only")

    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(node.store, "prune", fail)
            for step in (5, 10):
                await node.take(step)
                await node.snapshots.finish()
        [pruned] = (message for message in node.sent if isinstance(message, p.Pruned))
        assert pruned.error.endswith("could not remove old checkpoints: the disk is read-only")
        await node.take(15)
        await node.snapshots.finish()
        assert [m.removed for m in node.sent if isinstance(m, p.Pruned)][1:] == [((10, 1), (5, 1))]
        assert node.snapshots.checkpoints == ((15, 1),)
        found = node.store.find(15, 1)
        assert found is not None
        assert found.manifest.metrics == {"loss": 0.5}

    run(node, body)


def test_a_final_checkpoint_waits_for_a_snapshot_that_is_not_sealed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a newer snapshot is not sealed yet, the agent waits for its seal and writes that one.

    The order may arrive between the end of a step and the seal of its snapshot.
    """
    node, seal, go_on = Node(tmp_path, shards=1), buffers_module._seal, threading.Event()
    node.store.free.set()

    def slow(buffer: SnapshotBuffer, made: StateId) -> bool:
        wait_set(go_on)
        return seal(buffer, made)

    async def body() -> None:
        await node.take(5, checkpoint=False)
        monkeypatch.setattr(buffers_module, "_seal", slow)
        taken = asyncio.ensure_future(node.take(10, checkpoint=False))
        await turns()
        node.snapshots.write_final_checkpoint(p.WriteFinalCheckpoint(step=5, generation=1))
        await turns()
        await in_pool(node.snapshots._writes, int)  # a write that did not wait is done by now
        go_on.set()
        await taken
        await node.snapshots.finish()
        assert node.steps_of(p.CheckpointWritten) == [10]

    run(node, body)


@pytest.fixture
def buffers() -> Iterator[list[int]]:
    fds = [create_buffer("test", 1 << 16) for _ in range(BUFFERS_OF_SHARD)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_a_rank_does_not_wait_for_the_store(buffers: list[int]) -> None:
    """While the store reads one of a shard's three buffers, the rank uses the other two in turn."""
    agent = [SnapshotBuffer(fd) for fd in buffers]
    place = RankPlace(0, shard=0, generation=1, shards=2)

    class Line:
        def send(self, message: p.SnapshotTaken | p.BufferRequest) -> None:
            if isinstance(message, p.SnapshotTaken):
                sealed = agent[message.buffer]
                sealed.seal()
                sealed.release_writer()

        def buffers(
            self, serial: int, timeout_s: float | None, *, generation: int
        ) -> tuple[p.BufferGrant, list[int]]:
            return p.BufferGrant(serial=serial), [os.dup(fd) for fd in buffers]

    writer, model = TorchSnapshotWriter(Line(), place, values=GivenValues()), torch.nn.Linear(2, 2)

    def take(step: int) -> list[int]:
        writer.take(
            {"model": model}, place=place, step=step, notes={}, checkpoint=False, wait=False
        )
        return sorted(buffer.state[0] for buffer in agent if buffer.state)

    assert [take(step) for step in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    held = next(buffer for buffer in agent if buffer.state == (1, 1))
    held.lock(write=False)
    assert [take(step) for step in (4, 5, 6)] == [[1, 3, 4], [1, 4, 5], [1, 5, 6]]
    held.unlock()
    assert take(7) == [5, 6, 7]
    writer.close()
    for buffer in agent:
        buffer.close()
