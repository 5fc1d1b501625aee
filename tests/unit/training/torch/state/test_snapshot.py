"""Snapshots of a state that all ranks hold, if the agent is late."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rekindle.agent.memory_limits import create_buffer
from rekindle.errors import CorruptError
from rekindle.protocol.agent import BufferGrant, BufferRequest, SnapshotTaken
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.rank.progress import RankPlace
from rekindle.rank.snapshot_writer import PATIENCE_S
from rekindle.training.torch import private
from rekindle.training.torch.state.sharding import GivenValues
from rekindle.training.torch.state.snapshot import TorchSnapshotWriter, load, load_snapshot


class Rank:
    """A rank, and the buffers of an agent that acts only on the test's request."""

    def __init__(self, compared: tuple[int, int] | None = None) -> None:
        self.taken: list[SnapshotTaken] = []
        self.compared = compared
        count = 2 if compared is None else 3
        self.fds = [create_buffer("test", 1 << 16) for _ in range(count)]
        self.agent = [SnapshotBuffer(fd) for fd in self.fds]
        self.asked: list[BufferRequest] = []
        self.makes = True  # the agent allocates requested memory at once
        self.patience: list[float | None] = []
        self.forgotten: list[int] = []
        self.writer = TorchSnapshotWriter(
            self,
            RankPlace(0, generation=1),
            values=GivenValues(),
            compared=lambda: self.compared,
        )
        self.model = torch.nn.Linear(2, 2)

    def send(self, message: SnapshotTaken | BufferRequest) -> None:
        if isinstance(message, BufferRequest):
            self.asked.append(message)
        else:
            self.taken.append(message)

    def buffers(
        self, serial: int, timeout_s: float | None, *, generation: int | None
    ) -> tuple[BufferGrant, list[int]] | None:
        """Return the agent's answer, like a Channel."""
        assert serial == self.asked[-1].serial
        self.patience.append(timeout_s)
        if not self.makes and timeout_s is not None:
            return None
        return BufferGrant(serial=serial), [os.dup(fd) for fd in self.fds]

    def forget(self, serial: int) -> None:
        """Record the discarded request."""
        self.forgotten.append(serial)

    def take(self, step: int, *, checkpoint: bool = False, wait: bool = False) -> bool:
        return self.writer.take(
            {"model": self.model},
            place=RankPlace(0, generation=1, writes=True),
            step=step,
            notes={},
            checkpoint=checkpoint,
            wait=wait,
        )

    def seal(self, step: int) -> None:
        """Seal the snapshot of a step, like the agent after it has written a due checkpoint."""
        for buffer in self.agent:
            if buffer.state == (step, 1):
                buffer.seal()

    def close(self) -> None:
        self.writer.close()
        for buffer, fd in zip(self.agent, self.fds, strict=True):
            buffer.close()
            os.close(fd)
        self.agent, self.fds = [], []


@pytest.fixture
def rank() -> Iterator[Rank]:
    found = Rank()
    yield found
    found.close()


def test_a_sealed_snapshot_is_kept(rank: Rank) -> None:
    """A new snapshot overwrites an unsealed one or the older sealed one, and one sealed one stays.

    If neither snapshot is sealed, the rank leaves the new one out.
    """
    assert rank.take(5)
    assert rank.take(10)  # there was room
    assert not rank.take(15)  # neither is sealed
    rank.seal(5)
    assert rank.take(20)
    assert [buffer.state for buffer in rank.agent] == [(5, 1), (20, 1)]
    rank.seal(20)
    assert rank.take(25)
    assert [buffer.state for buffer in rank.agent] == [(25, 1), (20, 1)]


def test_frozen_weights_are_copied_once(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer gets a frozen weight again only if its content differs, and has each state exactly.

    A change counts also without torch's version counter. In another generation the agent may have
    written to the buffers.
    """
    rank.close()
    rank.fds = [create_buffer("test", 1 << 20) for _ in range(2)]
    rank.agent = [SnapshotBuffer(fd) for fd in rank.fds]
    copied: list[int] = []
    copy_all = private.copy_all

    def count(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copied.append(sum(each.numel() for each in sources))
        copy_all(targets, sources)

    monkeypatch.setattr(private, "copy_all", count)
    rank.model = torch.nn.Sequential(torch.nn.Linear(200, 200, bias=False), torch.nn.Linear(200, 1))
    frozen = rank.model[0].requires_grad_(False).weight

    def kept(step: int, generation: int = 1) -> int:
        """Take a snapshot, check what is in it, and return how many elements were copied."""
        with torch.no_grad():
            rank.model[1].weight.add_(1.0)
        expected = {name: each.clone() for name, each in rank.model.state_dict().items()}
        place = RankPlace(0, generation=generation, writes=True)
        named = {"model": rank.model}
        assert rank.writer.take(
            named, place=place, step=step, notes={}, checkpoint=False, wait=False
        )
        for buffer in rank.agent:
            if buffer.state == (step, generation):
                buffer.seal()
                there = torch.nn.Sequential(
                    torch.nn.Linear(200, 200, bias=False), torch.nn.Linear(200, 1)
                )
                load({"model": there}, buffer)
                assert all(
                    torch.equal(each, expected[name]) for name, each in there.state_dict().items()
                )
        return copied[-1]

    whole = 200 * 200 + 201
    assert [kept(5), kept(10), kept(15), kept(20)] == [whole, whole, 201, 201]
    frozen.data[3, 3] += 1.0
    assert [kept(25), kept(30), kept(35)] == [whole, whole, 201]
    assert [kept(40, 2), kept(45, 2), kept(50, 2)] == [whole, whole, 201]


def test_a_checkpoint_that_is_overwritten_before_the_agent_comes(rank: Rank) -> None:
    """If a snapshot overwrites one that is due as a checkpoint, it becomes the checkpoint, once."""
    rank.take(5)
    rank.seal(5)
    rank.take(10, checkpoint=True)
    rank.take(12)
    assert [buffer.state for buffer in rank.agent] == [(5, 1), (12, 1)]
    assert [(t.step, t.checkpoint) for t in rank.taken] == [(5, False), (10, True), (12, True)]
    rank.seal(12)
    rank.take(15)
    rank.seal(15)
    rank.take(18)
    assert [t.checkpoint for t in rank.taken[3:]] == [False, False]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("byte", [9, 400, -1])
def test_a_damaged_snapshot_leaves_nothing_behind(byte: int, rank: Rank) -> None:
    """If any part of a snapshot is damaged, the rank refuses it, unlocks it and frees memory."""
    rank.take(1)
    rank.seal(1)
    held = rank.agent[0]
    held.file[byte] ^= 0x40
    fds = [os.dup(fd) for fd in rank.fds]
    # As in a new process, which does not have the memory mapped.
    rank.close()
    gc.collect()  # the objects of earlier tests
    before = descriptors()
    rank.fds = fds
    with pytest.raises(CorruptError):
        load_snapshot(rank, 0, {"model": rank.model}, (1, 1))
    other = [SnapshotBuffer(fd) for fd in fds]
    assert all(buffer.lock(write=True) for buffer in other)
    for buffer in other:
        buffer.close()
        buffer.close()  # twice is once
    rank.fds = []
    gc.collect()
    assert descriptors() == before
    for fd in fds:
        os.close(fd)


def test_a_snapshot_that_fails_is_not_in_the_way(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a snapshot fails, its buffer is empty and unlocked, and the rank can take the next one."""
    rank.take(1)
    rank.seal(1)

    def fail(*_: object) -> None:
        raise RuntimeError("a device was lost")

    with monkeypatch.context() as patched:
        patched.setattr(private, "copy_all", fail)
        with pytest.raises(RuntimeError, match="a device was lost"):
            rank.take(2)
    assert [buffer.state for buffer in rank.agent] == [(1, 1), None]
    assert rank.agent[1].lock(write=True)
    rank.agent[1].unlock()
    assert rank.take(3)


def test_training_goes_on_while_the_first_memory_is_made(rank: Rank) -> None:
    """While the agent allocates the first buffers, training continues without snapshots.

    The rank asks once. Its first snapshot waits PATIENCE_S for the answer, the later ones do not
    wait.
    """
    rank.makes = False
    assert [rank.take(step) for step in (1, 2)] == [False, False]
    assert rank.patience == [PATIENCE_S, 0.0]
    rank.makes = True
    assert rank.take(3)
    assert rank.take(4)
    # The rank has the buffers since step 3.
    assert (len(rank.asked), rank.patience) == (1, [PATIENCE_S, 0.0, 0.0])
    assert [snapshot.step for snapshot in rank.taken] == [3, 4]


def test_the_last_checkpoint_waits_for_its_memory(rank: Rank) -> None:
    """The last checkpoint waits without a limit for its memory, also if it is the first one."""
    rank.makes = False
    assert rank.take(1, checkpoint=True, wait=True)
    assert rank.patience == [None]


def test_a_state_that_changes_while_memory_is_made(rank: Rank) -> None:
    """If the state's shape changes during the allocation, the rank asks again.

    It discards the answer to the first request.
    """
    rank.makes = False
    assert not rank.take(1)
    rank.model = torch.nn.Linear(3, 3)
    assert not rank.take(2)
    rank.makes = True
    assert rank.take(3)
    first, second = (asked.serial for asked in rank.asked)
    assert second > first
    assert rank.forgotten == [first]


@pytest.mark.parametrize(
    ("checkpoint", "patience"), [(True, None), (False, PATIENCE_S)], ids=["written", "kept"]
)
def test_a_shard_that_is_to_be_written_waits_for_its_memory(
    checkpoint: bool, patience: float | None, rank: Rank
) -> None:
    """A shard that becomes a checkpoint waits for its memory without a limit.

    The agents write the other shards of its step, too. Another snapshot waits PATIENCE_S.
    """
    place = RankPlace(0, shard=0, generation=1, shards=2, writes=True)
    rank.makes = False
    rank.fds.append(create_buffer("test", 1 << 16))
    writer = TorchSnapshotWriter(rank, place, values=GivenValues())
    taken = writer.take(
        {"model": rank.model}, place=place, step=1, notes={}, checkpoint=checkpoint, wait=False
    )
    assert (taken, rank.patience) == (checkpoint, [patience])
    writer.close()
    os.close(rank.fds.pop())


def test_a_snapshot_from_before_a_difference_is_kept() -> None:
    """A third buffer keeps the newest snapshot that is not newer than the newest equal step.

    While a comparison has no result, its own newest snapshot stays as well.
    """
    rank = Rank((4, 4))
    steps = []
    for step, compared in (
        (10, (8, 8)),
        (20, (16, 8)),  # the comparison of step 16 needs the snapshot of step 10
        (30, (16, 8)),
        (40, (32, 8)),  # that of step 32 waits
        (50, (32, 32)),  # 30 takes the place of 10
        (60, (32, 32)),
        (70, (64, 32)),  # 60 waits for its comparison
        (80, (64, 32)),
        (90, (64, 64)),  # 60 takes the place of 30
        (100, (64, 64)),
    ):
        rank.compared = compared
        assert rank.take(step)
        rank.seal(step)
        steps.append(sorted(buffer.state[0] for buffer in rank.agent if buffer.state))
    rank.close()
    assert steps == [
        [10],
        [10, 20],
        [10, 20, 30],
        [10, 30, 40],
        [30, 40, 50],
        [30, 50, 60],
        [30, 60, 70],
        [30, 60, 80],
        [60, 80, 90],
        [60, 90, 100],
    ]


def test_a_rank_without_other_ranks_has_two_buffers() -> None:
    """Only a rank that compares its state asks for the third buffer."""
    for compared, count in ((None, 2), ((4, 4), 3)):
        rank = Rank(compared)
        assert rank.take(1)
        assert rank.asked[0].buffers == count
        rank.close()
