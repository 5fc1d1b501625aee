"""Writes a rank's state into its agent's memory, for any framework.

If all ranks hold the same state, any snapshot serves all of them. The writer then skips a snapshot
when no buffer is free. A snapshot of a shard is only useful with those of all other shards, so the
writer skips none. It overwrites the oldest one, or the one after it while the store has the oldest.
"""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from rekindle.checkpoints.format import FileLayout, plan_layout, write_header
from rekindle.errors import CheckpointError
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import BUFFERS, BUFFERS_OF_SHARD, SnapshotBuffer
from rekindle.rank.channel import Channel
from rekindle.rank.progress import RankPlace
from rekindle.states import StateId

STEP = "step"
METADATA_SKELETON = "skeleton"
# Seconds that training waits for the memory of its first snapshot. An agent is never busy for so
# long, and it takes longer to make memory of many gigabytes.
PATIENCE_S = 3.0
_TICK_S = 0.0005
_serials = itertools.count(1)
# Bytes by which the skeleton (learning rates, counters) may grow between snapshots, at least. New
# buffers are empty, so they must be rare.
_ROOM = 16_384


class Captured(NamedTuple):
    """A state in the framework's form.

    skeleton: JSON that names the tensors, and has all other values. tensors: the live tensors, by
    name. forms: the name, safetensors code and shape of each tensor.

    form_metadata: metadata that follow from the forms. None: the former state had the same forms.
    """

    skeleton: bytes
    tensors: Mapping[str, Any]
    forms: tuple[tuple[str, str, tuple[int, ...]], ...]
    form_metadata: Mapping[str, str] | None = None


class SnapshotWriter(ABC):
    """Copies the state of one rank to its agent's buffers in turn.

    compared: returns the newest step whose state ranks compare, and the newest equal one; None: no
    other rank has the same state. Ranks that differ return to a snapshot from before that, so one
    more buffer keeps the newest snapshot that is not newer than the newest equal step.
    """

    def __init__(
        self,
        channel: Channel,
        place: RankPlace,
        compared: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        self._channel = channel
        self._compared = compared
        self._awaits: StateId | None = None  # kept until the comparison after it has a result
        self._slot = place.slot
        self._sharded = place.shard is not None
        self._count = BUFFERS_OF_SHARD if self._sharded else BUFFERS
        self._layout: FileLayout | None = None
        self._room = 0  # bytes for the metadata
        self._form_metadata: Mapping[str, str] = {}  # metadata that follow from the state's shape
        self._forms: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
        self._buffers: list[SnapshotBuffer] = []
        self._views: list[Sequence[Any]] = []
        self._asked: int | None = None  # the request for buffers without an answer yet
        self._outlasts = False
        self._holds: Callable[[], bool] | None = None  # returns whether the copy is consistent
        self._to_write: int | None = None  # the buffer whose newest snapshot becomes a checkpoint

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
        """Copy the state after `step` finished steps; training continues when this returns.

        notes: values for a checkpoint's manifest, by the keys of
        rekindle.agent.snapshots.checkpoint_queue.
        False: there was no free buffer, or the state changed during the copy. The agent reads one
        buffer or has not sealed the other yet (one sealed snapshot always stays), or it still makes
        the buffers. With `wait` this waits for a buffer. It also waits for the memory of a shard
        that becomes a checkpoint, because the nodes write the other shards as well.
        Raises CheckpointError: the agent has no memory for the buffers.
        """
        began = time.monotonic()
        state = self.capture(named, place, before=self._forms)
        if state.form_metadata is not None:
            self._form_metadata = state.form_metadata
        metadata = {
            STEP: str(step),
            METADATA_SKELETON: state.skeleton.decode(),
            **{name: msgspec.json.encode(note).decode() for name, note in notes.items()},
            **self._form_metadata,
        }
        during = None if self._outlasts else place.generation
        needed = wait or (checkpoint and self._sharded)
        if not self._fit(state, metadata, wait=needed, generation=during):
            return False
        index = self._lock_oldest(place.copied) if self._sharded else self._lock_one(wait=wait)
        if index is None:
            return False
        buffer = self._buffers[index]
        assert self._layout is not None
        # The agent drops an overwritten snapshot. This one becomes the checkpoint instead of it.
        unwritten = index == self._to_write and buffer.state is not None and not buffer.is_sealed
        checkpoint = checkpoint or (unwritten and place.writes)
        self._to_write = index if checkpoint else None
        try:
            buffer.begin()
            write_header(self._layout, metadata, buffer.data[: self._layout.total_bytes])
            if state.tensors:
                self.copy(self._views[index], state)
            if self._holds is not None and not self._holds():
                return False  # the buffer stays invalid
            buffer.commit(StateId(step, place.generation), self._layout.total_bytes)
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
        return True

    def outlast(self, holds: Callable[[], bool]) -> None:
        """Wait for the agent from now on even if the generation has ended.

        holds: called after each copy; it returns whether the state did not change during the copy.
        """
        self._outlasts, self._holds = True, holds

    def _lock_oldest(self, copied: bool) -> int:
        """Lock the oldest buffer for writing, once the other snapshots are safe.

        If another node keeps copies, the newest snapshot must be there as well. Ranks may differ by
        one snapshot. The node has two copies of each rank, and one of their states must exist for
        all ranks.
        """
        oldest, *kept = self._free()
        self._wait_settled(*(kept if copied else kept[:-1]))
        if self._buffers[oldest].lock(write=True):
            return oldest
        # The store reads the oldest for an unknown time. The next one is settled, so the rank may
        # overwrite it instead; then the newest must be settled as well.
        *after, newest = kept
        self._wait_settled(newest)
        while True:
            for index in (oldest, *after):
                if self._buffers[index].lock(write=True):
                    return index
            time.sleep(_TICK_S)

    def _wait_settled(self, *indices: int) -> None:
        for each in (self._buffers[index] for index in indices):
            while each.state is not None and not each.is_released:
                time.sleep(_TICK_S)  # the agent is a whole interval late

    def _lock_one(self, *, wait: bool) -> int | None:
        """Lock the older buffer for writing, or the newer one if the agent reads the older."""
        free = self._free()
        for index in free:
            others = [buffer for buffer in self._buffers if buffer is not self._buffers[index]]
            kept = any(map(_is_sealed, others)) or self._buffers[index].state is None
            if kept and self._buffers[index].lock(write=True):
                return index
        if wait:
            self._buffers[free[0]].lock(write=True, wait=True)
            return free[0]
        return None

    def _free(self) -> list[int]:
        """Return the buffers that the next snapshot may overwrite, the oldest first."""
        states = {b.state: index for index, b in enumerate(self._buffers) if b.state}
        in_order = sorted(range(len(self._buffers)), key=lambda i: self._buffers[i].recency)
        compared = self._compared()
        if compared is None or len(self._buffers) <= self._count:
            return in_order
        newest, equal = compared
        if newest <= equal or self._awaits not in states or self._awaits[0] <= equal:
            self._awaits = _newest(states, newest) if newest > equal else None
        kept = {states[state] for state in (_newest(states, equal), self._awaits) if state}
        return [index for index in in_order if index not in kept]

    def _fit(
        self,
        state: Captured,
        metadata: Mapping[str, str],
        *,
        wait: bool,
        generation: int | None,
    ) -> bool:
        """Prepare buffers for this state: once, and again when the state changes its shape.

        False: the agent still makes them. Gigabytes take seconds, in which training continues. With
        `wait` this waits as long as the generation lasts.
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
            count = self._count + (self._compared() is not None)
            self._asked = ask_for_buffers(self._channel, self._slot, needed, count)
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
            if buffer.state is not None and not buffer.is_sealed:
                _drop_unannounced(buffer)
        begins = {spec.name: layout.header_bytes + spec.begin for spec in layout.specs}
        self._views = [self.views(buffer.data, state, begins) for buffer in buffers]

    @abstractmethod
    def capture(self, named: Mapping[str, Any], place: RankPlace, *, before: object) -> Captured:
        """Read the state. before: the forms of the last state; if equal, omit `form_metadata`."""

    @abstractmethod
    def views(self, data: memoryview, state: Captured, begins: Mapping[str, int]) -> Sequence[Any]:
        """Return tensors like the state's, in its order, at these offsets of the memory."""

    @abstractmethod
    def copy(self, views: Sequence[Any], state: Captured) -> None:
        """Copy the contents of the state's tensors to the views."""

    def close(self) -> None:
        """Close the buffers; the agent keeps their contents."""
        self._views = []
        self._layout = None
        if self._asked is not None:
            self._channel.forget(self._asked)
            self._asked = None
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


def _is_sealed(buffer: SnapshotBuffer) -> bool:
    return buffer.is_sealed


def _newest(states: Iterable[StateId], step: int) -> StateId | None:
    """Return the newest of these states that is not newer than this step, or None."""
    return max((each for each in states if each.step <= step), default=None)


def _drop_unannounced(buffer: SnapshotBuffer) -> None:
    """Invalidate a snapshot that a dead process did not report: the agent never seals it."""
    buffer.lock(write=True, wait=True)
    if not buffer.is_sealed:
        buffer.begin()
    buffer.unlock()


def ask_for_buffers(
    channel: Channel,
    slot: int,
    data_bytes: int = 0,
    count: int = 0,
    copy: StateId | None = None,
    *,
    own: bool = False,
) -> int:
    """Ask the rank's agent for its buffers; 0 bytes: the existing ones. Return the serial number.

    copy: the state whose replica one of them must have. own: the copies of the rank's own state.
    """
    serial = next(_serials)
    channel.send(
        protocol.BufferRequest(
            rank=slot, bytes=data_bytes, buffers=count, copy=copy, serial=serial, own=own
        )
    )
    return serial


def receive_buffers(
    channel: Channel,
    serial: int,
    timeout_s: float | None = None,
    *,
    generation: int | None = None,
) -> list[SnapshotBuffer] | None:
    """Return the requested buffers; None: the timeout or the end of the generation came first.

    Raises CheckpointError: the agent has no buffers, no memory for them, or no such copy.
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
    channel: Channel, slot: int, state: StateId, *, copy: bool = False
) -> Iterator[SnapshotBuffer]:
    """Lock and yield the agent's buffer with this state; copy: fetch the replica first.

    Raises CheckpointError: no buffer has the state.
    """
    count = BUFFERS_OF_SHARD if copy else 0
    serial = ask_for_buffers(channel, slot, count=count, copy=state if copy else None)
    buffers = receive_buffers(channel, serial) or []
    try:
        held = [buffer for buffer in buffers if buffer.state == state]
        if not held:
            step, generation = state
            there = [buffer.state and tuple(buffer.state) for buffer in buffers]
            raise CheckpointError(
                f"no snapshot of step {step} of generation {generation}; the buffers hold {there}"
            )
        held[0].lock(write=False, wait=True)
        yield held[0]
        held[0].unlock()
    finally:
        for buffer in buffers:
            buffer.close()
