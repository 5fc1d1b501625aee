"""Keep the state that a rank shares with no other rank: statistics, generators, and `per_rank`.

docs/decisions/031-state-of-one-rank.md has the rules.
"""

from __future__ import annotations

import enum
import random
import struct
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.nn import SyncBatchNorm

from rekindle.console import say
from rekindle.errors import CheckpointError, CorruptError, SessionError
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.rank.channel import Channel
from rekindle.rank.snapshot_writer import ask_for_buffers, receive_buffers
from rekindle.states import StateId
from rekindle.training.torch import private
from rekindle.training.torch.data.all_gather import Sharing
from rekindle.training.torch.state.capture import as_bytes, capture, finish, prepare
from rekindle.training.torch.state.in_place import Stateful

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
STATISTICS = ("running_mean", "running_var")
LEAVE_S = 10.0  # for the parts of ranks that leave their loops after the same step
NOTICE_BYTES = 16 << 20
_COPIES = 2  # one is written while the other is kept
_ALIGNED = 16  # bytes
_ROOM = 4096  # bytes; the texts of numbers in a state vary in their length
# The moment of a step after which its part is complete, and the steps in which it was; bytes of
# statistics, skeleton and tensors; checksum of all that follows.
_HEAD = struct.Struct("<qqqqqQ")


class Parts:
    """The encoded parts of all ranks, one row (uint8) for each: its length, and its bytes.

    optional: an imported state lacks them. loaded: a load has brought them.
    """

    optional = True

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.loaded = False

    def put(self, parts: list[bytes]) -> None:
        """Take the parts of all ranks, in their order. Rows become longer, but never shorter."""
        longest = max(map(len, parts)) + 8
        if self.rows is None or self.rows.shape[0] != len(parts) or self.rows.shape[1] < longest:
            width = -(-(longest + _ROOM) // _ROOM) * _ROOM
            self.rows = torch.zeros(len(parts), width, dtype=torch.uint8)
        for row, part in zip(self.rows.numpy(), parts, strict=True):
            data = len(part).to_bytes(8, "little") + part
            row[: len(data)] = np.frombuffer(data, np.uint8)

    def part(self, number: int) -> bytes:
        """Return the part of a rank."""
        assert self.rows is not None
        row = self.rows[number].numpy().tobytes()
        return row[8 : 8 + int.from_bytes(row[:8], "little")]

    def state_dict(self) -> dict[str, Any]:
        """Return the rows."""
        return {"rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the rows of a loaded state."""
        self.rows, self.loaded = state["rows"], True


class Moment(enum.IntEnum):
    """A moment of a step at which its part of the state may be complete."""

    FORWARD = 0  # the only forward pass of the model has ended
    UPDATE = 1  # the first update begins
    END = 2


class _Noted(NamedTuple):
    """The digest of the part at the moment of the step that leads to this state."""

    state: StateId
    digest: int


class OwnState:
    """The part of the state that one rank shares with no other.

    named: the objects of the Session; the statistics of their modules belong to the part. things:
    generators and the objects of `per_rank`, by name. declared: the names in `per_rank`.

    Peers can finish a step in which this process ends. So the part of the next state is written as
    soon as it is complete. The first steps show when that is: at the earliest moment after which
    no step has changed it. A declared object may change at any time, so its moment is the end.
    """

    def __init__(  # noqa: PLR0913  the rank, and what it has
        self,
        named: Mapping[str, Any],
        things: Mapping[str, Stateful],
        declared: Iterable[str],
        *,
        channel: Channel,
        slot: int,
        ranks: int,
        device: torch.device,
    ) -> None:
        self.parts = Parts()
        self.names = (*things, *declared)
        self._named = named
        self._things = dict(things)
        self._declared = tuple(declared)
        self._copies = _Copies(channel, slot)
        self._slot, self._ranks = slot, ranks
        self._statistics = _Statistics(())
        self._sharing = Sharing()
        early = Moment.FORWARD if device.type == "cpu" else Moment.UPDATE  # it would wait there
        self._moment = Moment.END if self._declared else early
        self._steps = 0  # those after which the part was complete at the moment
        self._forwards = 0  # in this step
        self._large = False  # a line has reported that the part is large
        self._noted: _Noted | None = None
        self._gathered: StateId | None = None

    def states(self) -> tuple[StateId, ...]:
        """Return the states whose part of this rank is in the memory of its agent."""
        return self._copies.states()

    def begin(self, state: StateId, *, fresh: bool) -> None:
        """Begin a generation with this state. fresh: the script has just built it."""
        self._statistics = _Statistics(statistics_of(self._named))
        self._sharing = Sharing()
        self._noted, self._gathered, self._forwards = None, None, 0
        if fresh or state not in self.states():
            self._write(state, self._encode())

    def took(self, state: StateId, *, copied: bool) -> None:
        """Complete a state that the rank has loaded.

        copied: it comes from a peer, whose memory has no parts of other ranks.
        Raises CheckpointError: the part is missing; CorruptError: it is damaged; SessionError: it
        belongs to another model, or to a job of another world size.
        """
        self._statistics = _Statistics(statistics_of(self._named))
        loaded, self.parts.loaded = self.parts.loaded, False
        if copied and not loaded:
            self._decode(self._copies.read(state))
        elif not loaded or self.parts.rows is None:
            self._say(state, "has no state of single ranks", "keep what the script has built")
        elif len(self.parts.rows) == self._ranks:
            self._decode(self.parts.part(self._slot))
        elif self._declared:
            raise SessionError(
                f"the state after step {state.step} has {', '.join(self._declared)} of "
                f"{len(self.parts.rows)} ranks, but this job has {self._ranks}: resume it with "
                f"{len(self.parts.rows)} ranks, or leave per_rank out"
            )
        else:
            what = f"belongs to {len(self.parts.rows)} ranks, and this job has {self._ranks}"
            self._say(state, what, "begin on all ranks with those of the rank that wrote it")

    def at(self, moment: Moment, state: StateId) -> None:
        """Note the part at a moment of the step that leads to this state."""
        self._forwards += moment is Moment.FORWARD
        if moment is not self._moment:
            return
        part = self._encode()
        self._noted = _Noted(state, _digest(part))
        if self._steps:
            self._write(state, part)

    def step_done(self, state: StateId) -> None:
        """Keep the part of a finished step, unless it was complete and written before."""
        noted, self._noted = self._noted, None
        forwards, self._forwards = self._forwards, 0
        part = self._encode()
        if noted is not None and noted.state == state:
            single = forwards == 1 or self._moment is not Moment.FORWARD
            if single and noted.digest == _digest(part):
                self._steps += 1
                if self._steps > 1:
                    return
            else:
                self._moment, self._steps = Moment(self._moment + 1), 0
            part = self._encode()
        self._write(state, part)

    def gather(self, state: StateId) -> None:
        """Collect the parts of all ranks for a snapshot of this state; a collective.

        Raises RuntimeError, as collectives do: a rank is lost.
        """
        self.parts.put(self._sharing.all_gather(self._encode()))
        self._gathered = state

    def exchange(self, state: StateId, *, reads: bool) -> None:
        """Show the part to other ranks that leave their loops; reads: collect all parts.

        A rank that leaves alone must not wait in a collective.
        """
        store = private.default_store()
        keys = [f"rekindle-own-{state.step}-{number}" for number in range(self._ranks)]
        store.set(keys[self._slot], self._encode())
        if not reads:
            return
        try:
            store.wait(keys, timedelta(seconds=LEAVE_S))
        except RuntimeError:
            say(
                f"there is no checkpoint of step {state.step}: not all ranks have left their loops "
                f"within {LEAVE_S:g} s, and it needs the state of each rank"
            )
            return
        self.parts.put([store.get(key) for key in keys])
        self._gathered = state

    def has_parts(self, state: StateId) -> bool:
        """Return whether the parts of all ranks belong to this state."""
        return self._gathered == state

    def _write(self, state: StateId, part: bytes) -> None:
        if len(part) > NOTICE_BYTES and not self._large:
            self._large = True
            if self._slot == 0:
                say(f"{len(part) / 1e6:.0f} MB of state of one rank are copied in each step")
        self._copies.write(state, part)

    def _say(self, state: StateId, what: str, then: str) -> None:
        if self._slot == 0 and (self._things or self._statistics):
            kinds = [*self._things] + ["statistics of BatchNorm"] * bool(self._statistics)
            say(f"the state after step {state.step} {what}: {', '.join(kinds)} {then}")

    def _encode(self) -> bytes:
        state = capture(self._things)
        rows = [as_bytes(each.cpu()).numpy().tobytes() for each in state.tensors.values()]
        pieces = [self._statistics.read(), state.skeleton, b"".join(rows)]
        body = b"".join(pieces)
        sizes = map(len, pieces)
        head = _HEAD.pack(self._moment, self._steps, *sizes, xxhash.xxh3_64_intdigest(body))
        return head + body

    def _decode(self, part: bytes) -> None:
        moment, steps, first, second, third, checksum = _HEAD.unpack_from(part)
        body = part[_HEAD.size :]
        if xxhash.xxh3_64_intdigest(body) != checksum or len(body) != first + second + third:
            raise CorruptError(f"the state of rank {self._slot} alone is damaged")
        self._statistics.fill(body[:first])
        targets = prepare(self._things, body[first : first + second])
        at = first + second
        with torch.no_grad():
            for target in targets.values():
                row = torch.frombuffer(bytearray(body[at : at + target.nbytes]), dtype=torch.uint8)
                target.copy_(row.view(target.dtype).view(target.shape))
                at += target.nbytes
        finish(self._things)
        self._moment, self._steps = max(self._moment, Moment(moment)), steps


def _digest(part: bytes) -> int:
    return int(_HEAD.unpack_from(part)[-1])


class _Statistics:
    """The running statistics of modules, as one row of bytes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        begins, size = [], 0
        for tensor in self._tensors:
            begins.append(size)
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        device = self._tensors[0].device if self._tensors else "cpu"
        self._row = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views = [
            self._row[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for begin, tensor in zip(begins, self._tensors, strict=True)
        ]

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def read(self) -> bytes:
        """Return the bytes of all statistics; one copy from a device."""
        if self._tensors:
            private.copy_all(self._views, self._tensors)
        return self._row.cpu().numpy().tobytes()

    def fill(self, data: bytes) -> None:
        """Set all statistics. Raises SessionError: these are of another model."""
        if len(data) != len(self._row):
            raise SessionError(
                f"the state belongs to another model: it has {len(data)} bytes of statistics of "
                f"BatchNorm, but this model has {len(self._row)}"
            )
        if self._tensors:
            self._row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            with torch.no_grad():
                private.copy_all(self._tensors, self._views)


def found(
    named: Mapping[str, Any], extra: Mapping[str, Any], declared: Mapping[str, Stateful]
) -> tuple[dict[str, Stateful], list[str]]:
    """Return the generators in `extra` and the declared objects, and the names of all parts."""
    things = {n: named[n] for n, each in extra.items() if isinstance(each, GENERATORS)}
    things |= declared
    return things, [*things] + ["statistics of BatchNorm"] * bool([*statistics_of(named)])


def statistics_of(things: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the running statistics in modules, which each rank computes from its own batches."""
    for thing in things.values():
        for part in thing.modules() if isinstance(thing, torch.nn.Module) else ():
            if isinstance(part, private.NormBase) and not isinstance(part, SyncBatchNorm):
                buffers = private.buffers_of(part)
                found = (buffers.get(key) for key in STATISTICS)
                yield from (each for each in found if each is not None)


class _Copies:
    """The copies of one rank's part in the memory of its agent; they outlive this process.

    A write goes to the copy that is not the newest, and makes it valid last. So a process that ends
    in a write leaves the other copy valid.
    """

    def __init__(self, channel: Channel, slot: int) -> None:
        self._channel, self._slot = channel, slot
        self._buffers: list[SnapshotBuffer] | None = None  # None: not asked for yet
        self._newest = -1
        self._refused = False

    def states(self) -> tuple[StateId, ...]:
        """Return the states of the valid copies."""
        return tuple(buffer.state for buffer in self._open() if buffer.state is not None)

    def read(self, state: StateId) -> bytes:
        """Return the part of this state. Raises CheckpointError: there is no copy of it."""
        for number, buffer in enumerate(self._open()):
            if buffer.state == state:
                self._newest = number
                return bytes(buffer.file)
        raise CheckpointError(
            f"the node has no copy of the state of rank {self._slot} alone after step {state.step} "
            f"of generation {state.generation}"
        )

    def write(self, state: StateId, part: bytes) -> None:
        """Write a copy; a copy of the same state is overwritten."""
        buffers = self._open()
        if not self._refused and (not buffers or len(buffers[0].data) < len(part)):
            self._grow(len(part))
            buffers = self._open()
        if self._refused:
            return
        same = [number for number, buffer in enumerate(buffers) if buffer.state == state]
        self._newest = same[0] if same else (self._newest + 1) % len(buffers)
        buffer = buffers[self._newest]
        buffer.begin()
        buffer.data[: len(part)] = part
        buffer.commit(state, len(part))

    def _open(self) -> list[SnapshotBuffer]:
        if self._buffers is None:
            self._buffers = self._ask(0)
        return self._buffers

    def _grow(self, size: int) -> None:
        for buffer in self._buffers or ():
            buffer.close()
        try:
            self._buffers = self._ask(size + size // 2 + _ROOM)
        except CheckpointError as error:
            self._buffers, self._refused = [], True
            say(f"{error}: if this process ends, all ranks return to a snapshot")

    def _ask(self, size: int) -> list[SnapshotBuffer]:
        serial = ask_for_buffers(self._channel, self._slot, size, _COPIES, own=True)
        return receive_buffers(self._channel, serial) or []
