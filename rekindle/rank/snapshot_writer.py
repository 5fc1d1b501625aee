"""A rank's state into its agent's memory, whatever framework it trains with.

Of a state that all ranks hold any snapshot serves all of them: one that finds no free buffer is
left out. Of a sharded state a snapshot is worth something only with those of all other shards: none
is left out, and what is overwritten is the oldest, or, while the store has that, the one after it.
"""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from rekindle.checkpoints.format import FileLayout, plan_layout, write_header
from rekindle.errors import CheckpointError
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import BUFFERS, BUFFERS_OF_SHARD, SnapshotBuffer
from rekindle.rank.channel import Channel
from rekindle.rank.held_state import RankPlace
from rekindle.recovery.policy.plan import Made

STEP = "step"
METADATA_SKELETON = "skeleton"
# For which training waits for the memory of its first snapshot: longer than an agent is ever busy,
# shorter than it takes to make that of many gigabytes.
PATIENCE_S = 3.0
_TICK_S = 0.0005
_serials = itertools.count(1)
# Bytes by which the skeleton (learning rates, counters) may grow between snapshots, at least; new
# buffers have nothing in them, so they are to be rare.
_ROOM = 16_384


class Captured(NamedTuple):
    """A state as a framework holds it.

    skeleton: JSON that names the tensors, and says all else. tensors: the live ones, by name.
    forms: of each its name, its code of safetensors, and its shape. said: metadata that follow from
    these alone, unless they are those of the state before.
    """

    skeleton: bytes
    tensors: Mapping[str, Any]
    forms: tuple[tuple[str, str, tuple[int, ...]], ...]
    said: Mapping[str, str] | None = None


class SnapshotWriter(ABC):
    """Copies the state of one rank to its agent's buffers in turn."""

    def __init__(self, channel: Channel, place: RankPlace) -> None:
        self._channel = channel
        self._slot = place.slot
        self._sharded = place.shard is not None
        self._count = BUFFERS_OF_SHARD if self._sharded else BUFFERS
        self._layout: FileLayout | None = None
        self._room = 0  # bytes for the metadata
        self._said: Mapping[str, str] = {}  # metadata that follow from the state's shape
        self._forms: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
        self._buffers: list[SnapshotBuffer] = []
        self._views: list[Sequence[Any]] = []
        self._asked: int | None = None  # the request for buffers that is not answered yet
        self._next = 0
        self._outlasts = False
        self._holds: Callable[[], bool] | None = None  # whether what was copied is a state
        self._to_write: int | None = None  # the buffer whose newest snapshot is to be a checkpoint

    def take(
        self,
        named: Mapping[str, Any],
        *,
        place: RankPlace,
        step: int,
        notes: Mapping[str, Mapping[str, Any]],
        checkpoint: bool,
        wait: bool,
    ) -> bool:
        """Copy the state after `step` finished steps; training goes on when this returns.

        notes: what a checkpoint's manifest will tell, by the keys of
        rekindle.agent.snapshots.checkpoint_queue.
        False: there was no buffer to write, because the agent reads one or has not sealed the
        other yet (one sealed snapshot is always kept), or because it is still making them. With
        `wait`, one is waited for; so is the memory of a shard that is to be written to the store,
        for the other shards are written, too.
        Raises CheckpointError: the agent has no memory for the buffers.
        """
        began = time.monotonic()
        state = self.capture(named, place, before=self._forms)
        if state.said is not None:
            self._said = state.said
        metadata = {
            STEP: str(step),
            METADATA_SKELETON: state.skeleton.decode(),
            **{name: msgspec.json.encode(note).decode() for name, note in notes.items()},
            **self._said,
        }
        during = None if self._outlasts else place.generation
        needed = wait or (checkpoint and self._sharded)
        if not self._fit(state, metadata, wait=needed, generation=during):
            return False
        index = self._choose(wait=wait, copied=place.copied)
        if index is None:
            return False
        buffer = self._buffers[index]
        assert self._layout is not None
        # What the agent finds overwritten it drops: this one is written in its place.
        unwritten = index == self._to_write and buffer.made is not None and not buffer.is_sealed
        checkpoint = checkpoint or (unwritten and place.writes)
        self._to_write = index if checkpoint else None
        try:
            buffer.begin()
            write_header(self._layout, metadata, buffer.data[: self._layout.total_bytes])
            if state.tensors:
                self.copy(self._views[index], state)
            if self._holds is not None and not self._holds():
                return False  # the buffer stays invalid
            buffer.commit((step, place.generation), self._layout.total_bytes)
        finally:
            buffer.unlock()
        self._channel.send(
            protocol.SnapshotTaken(
                rank=self._slot,
                generation=place.generation,
                step=step,
                buffer=index,
                checkpoint=checkpoint,
                stall_s=time.monotonic() - began,
                shard=place.shard or 0,
                shards=place.shards,
            )
        )
        self._next = (index + 1) % self._count
        return True

    def outlast(self, holds: Callable[[], bool]) -> None:
        """Wait for the agent from now on whether or not the generation goes on.

        holds: asked behind each copy, which may have been made while the state changed.
        """
        self._outlasts, self._holds = True, holds

    def _choose(self, *, wait: bool, copied: bool) -> int | None:
        return self._lock_oldest(copied) if self._sharded else self._lock_one(wait=wait)

    def _lock_oldest(self, copied: bool) -> int:
        """Lock the oldest buffer for writing, once the snapshots that are kept are safe.

        Where another node keeps copies, the newest has to be there too: ranks may be a snapshot
        apart, and of the two that it has of each one must be there of all.
        """
        oldest, *kept = sorted(range(self._count), key=lambda i: self._buffers[i].recency)
        self._wait_settled(*(kept if copied else kept[:1]))
        if self._buffers[oldest].lock(write=True):
            return oldest
        # The store has it, for as long as it likes. What is written over instead has been settled;
        # so must be what is then the newest.
        after, newest = kept
        self._wait_settled(newest)
        while True:
            for index in (oldest, after):
                if self._buffers[index].lock(write=True):
                    return index
            time.sleep(_TICK_S)

    def _wait_settled(self, *indices: int) -> None:
        for each in (self._buffers[index] for index in indices):
            while each.made is not None and not each.is_settled:
                time.sleep(_TICK_S)  # the agent is a whole interval behind

    def _lock_one(self, *, wait: bool) -> int | None:
        """Lock the older buffer, or if the agent reads it the newer one, for writing."""
        first = self._next
        for index in (first, (first + 1) % BUFFERS):
            other = self._buffers[(index + 1) % BUFFERS]
            kept = other.is_sealed or self._buffers[index].made is None
            if kept and self._buffers[index].lock(write=True):
                return index
        if wait:
            self._buffers[first].lock(write=True, wait=True)
            return first
        return None

    def _fit(
        self,
        state: Captured,
        metadata: Mapping[str, str],
        *,
        wait: bool,
        generation: int | None,
    ) -> bool:
        """Have buffers that the state fits into; made once, or anew when it changes its shape.

        False: the agent is still at it. Gigabytes take it seconds, in which training goes on. Who
        waits does so for as long as the generation goes on.
        """
        room = len(msgspec.json.encode(metadata))
        patience_s = None if wait else 0.0
        if self._layout is None or state.forms != self._forms or room > self._room:
            self.close()
            self._room = 2 * room + _ROOM
            self._layout = plan_layout(state.forms, metadata_room=self._room)
            self._forms = state.forms
            self._to_write = None
            needed = self._layout.total_bytes
            self._asked = ask_for_buffers(self._channel, self._slot, needed, self._count)
            patience_s = None if wait else PATIENCE_S
        if self._asked is not None:
            asked, self._asked = self._asked, None
            buffers = receive_buffers(self._channel, asked, patience_s, generation=generation)
            if buffers is None:
                self._asked = asked
                return False
            self._use(buffers, state, self._layout)
        return True

    def _use(self, buffers: list[SnapshotBuffer], state: Captured, layout: FileLayout) -> None:
        self._buffers = buffers
        for buffer in buffers:
            buffer.map_pages()
            if buffer.made is not None and not buffer.is_sealed:
                _drop_unannounced(buffer)
        # What a dead process of this rank left there is kept until there is something newer.
        self._next = min(range(self._count), key=lambda i: buffers[i].recency)
        begins = {spec.name: layout.header_bytes + spec.begin for spec in layout.specs}
        self._views = [self.views(buffer.data, state, begins) for buffer in buffers]

    @abstractmethod
    def capture(self, named: Mapping[str, Any], place: RankPlace, *, before: object) -> Captured:
        """Read the state. before: the forms of the last one; `said` is not asked for if equal."""

    @abstractmethod
    def views(self, data: memoryview, state: Captured, begins: Mapping[str, int]) -> Sequence[Any]:
        """Tensors like the state's, in its order, that lie at these places of the memory."""

    @abstractmethod
    def copy(self, views: Sequence[Any], state: Captured) -> None:
        """Fill the views with what the state's tensors hold."""

    def close(self) -> None:
        """Let go of the buffers; the agent keeps what they hold."""
        self._views = []
        self._layout = None
        if self._asked is not None:
            self._channel.forget(self._asked)
            self._asked = None
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


def _drop_unannounced(buffer: SnapshotBuffer) -> None:
    """A process that died before it could tell of its snapshot has left one that nobody seals."""
    buffer.lock(write=True, wait=True)
    if not buffer.is_sealed:
        buffer.begin()
    buffer.unlock()


def ask_for_buffers(
    channel: Channel, slot: int, data_bytes: int = 0, count: int = 0, copy: Made | None = None
) -> int:
    """Ask the rank's agent for its buffers; 0 bytes: those that exist. Gives what to receive by.

    copy: the state whose replica is to be in one of them.
    """
    serial = next(_serials)
    channel.send(
        protocol.BufferRequest(rank=slot, bytes=data_bytes, buffers=count, copy=copy, serial=serial)
    )
    return serial


def receive_buffers(
    channel: Channel,
    serial: int,
    timeout_s: float | None = None,
    *,
    generation: int | None = None,
) -> list[SnapshotBuffer] | None:
    """Get what was asked for; None: it is not there in time, or before this generation's end.

    Raises CheckpointError: the agent has none, or no memory for them, or no such copy is to be had.
    """
    answered = channel.buffers(serial, timeout_s, generation=generation)
    if answered is None:
        return None
    answer, fds = answered
    if answer.error:
        raise CheckpointError(answer.error)
    try:
        return [SnapshotBuffer(fd) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def kept(
    channel: Channel, slot: int, made: Made, *, copy: bool = False
) -> Iterator[SnapshotBuffer]:
    """The buffer of the agent's that has this state, locked; a copy is brought there first.

    Raises CheckpointError: it is not there.
    """
    count = BUFFERS_OF_SHARD if copy else 0
    serial = ask_for_buffers(channel, slot, count=count, copy=made if copy else None)
    buffers = receive_buffers(channel, serial) or []
    try:
        held = [buffer for buffer in buffers if buffer.made == made]
        if not held:
            step, generation = made
            there = [buffer.made for buffer in buffers]
            raise CheckpointError(
                f"no snapshot of step {step} of generation {generation}; the buffers hold {there}"
            )
        held[0].lock(write=False, wait=True)
        yield held[0]
        held[0].unlock()
    finally:
        for buffer in buffers:
            buffer.close()
