"""Keep the objects of `Session(per_rank=...)`: the state that a rank shares with no other rank.

docs/decisions/031-state-of-one-rank.md has the rules.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import xxhash

from rekindle.console import say
from rekindle.errors import CheckpointError, CorruptError, SessionError
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.rank.channel import Channel
from rekindle.rank.snapshot_writer import ask_for_buffers, receive_buffers
from rekindle.states import StateId
from rekindle.training.torch import private
from rekindle.training.torch.data.all_gather import Sharing
from rekindle.training.torch.state.capture import as_bytes, capture, finish, prepare
from rekindle.training.torch.state.digests import digest_of
from rekindle.training.torch.state.in_place import Stateful
from rekindle.training.torch.state.statistics import STATISTICS

LEAVE_S = 10.0  # for the parts of ranks that leave their loops after the same step
NOTICE_BYTES = 16 << 20
_COPIES = 2  # one is written while the other is kept
_ROOM = 4096  # bytes; the texts of numbers in a state vary in their length
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_HEAD = struct.Struct("<qqQ")  # bytes of skeleton and tensors; checksum of all that follows


def check_generators(extra: Mapping[str, Any], named: Mapping[str, Stateful]) -> None:
    """Compare the generators in `extra`, which all ranks have just built; a collective.

    named: the objects with a state for them. Raises SessionError: ranks have different ones.
    """
    held = [name for name, each in extra.items() if isinstance(each, _GENERATORS)]
    if not held:
        return
    own = np.array([digest_of(name, named[name]) for name in held], np.int64)
    rows = [np.frombuffer(row, np.int64) for row in Sharing().all_gather(own.tobytes())]
    for name, values in zip(held, np.stack(rows).T.tolist(), strict=True):
        if len(set(values)) > 1:
            raise SessionError(
                f"the generator {name!r} in extra is not the same on all ranks, so a replaced rank "
                f"would get that of another one: give per_rank={{{name!r}: ...}} instead"
            )


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


class OwnState:
    """The part of the state that one rank shares with no other: `things`, by name.

    of_steps: the things change in steps, so each step ends with a copy. Otherwise the owner calls
    write().
    """

    def __init__(
        self,
        things: Mapping[str, Stateful],
        *,
        channel: Channel,
        slot: int,
        ranks: int,
        of_steps: bool = True,
    ) -> None:
        self.of_steps = of_steps
        self.parts = Parts()
        self._things = dict(things)
        self._declared = ", ".join(name for name in things if name != STATISTICS)
        self._copies = _Copies(channel, slot)
        self._slot, self._ranks = slot, ranks
        self._sharing = Sharing()
        self._large = False  # a line has reported that the part is large
        self._gathered: StateId | None = None

    def states(self) -> tuple[StateId, ...]:
        """Return the states whose part of this rank is in the memory of its agent."""
        return self._copies.states()

    def begin(self, state: StateId, *, fresh: bool) -> None:
        """Begin a generation with this state. fresh: the script has just built it."""
        self._sharing, self._gathered = Sharing(), None
        if self.of_steps and (fresh or state not in self.states()):
            self.write(state)

    def took(self, state: StateId, *, copied: bool) -> None:
        """Complete a state that the rank has loaded.

        copied: it comes from a peer, whose memory has no parts of other ranks.
        Raises CheckpointError: the part is missing; CorruptError: it is damaged; SessionError: it
        belongs to a job of another world size.
        """
        loaded, self.parts.loaded = self.parts.loaded, False
        rows = self.parts.rows if loaded else None
        if copied and not loaded:
            self._decode(self._copies.read(state))
        elif rows is not None and len(rows) == self._ranks:
            self._decode(self.parts.part(self._slot))
        elif rows is not None and self._declared:
            raise SessionError(
                f"the state after step {state.step} has {self._declared} of {len(rows)} ranks, but "
                f"this job has {self._ranks}: resume it with {len(rows)} ranks, or leave per_rank "
                "out"
            )
        elif self._slot == 0:
            self._tell_missing(state)

    def _tell_missing(self, state: StateId) -> None:
        """Say what the objects have, because the loaded state has none for each of these ranks."""
        if self._declared:
            text = f"{self._declared} keep what the script has built"
        else:
            text = f"all ranks begin with the {STATISTICS} of the rank that wrote it"
        say(f"the state after step {state.step} has no state of single ranks: {text}")

    def step_done(self, state: StateId) -> None:
        """Keep a copy after a finished step, if the things change in steps."""
        if self.of_steps:
            self.write(state)

    def write(self, state: StateId) -> None:
        """Keep a copy of the part of this state."""
        part = self._encode()
        if len(part) > NOTICE_BYTES and not self._large:
            self._large = True
            if self._slot == 0:
                say(f"{len(part) / 1e6:.0f} MB of state of one rank are copied in each step")
        self._copies.write(state, part)

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

    def _encode(self) -> bytes:
        state = capture(self._things)
        rows = [as_bytes(each.cpu()).numpy().tobytes() for each in state.tensors.values()]
        tensors = b"".join(rows)
        body = state.skeleton + tensors
        return _HEAD.pack(len(state.skeleton), len(tensors), xxhash.xxh3_64_intdigest(body)) + body

    def _decode(self, part: bytes) -> None:
        first, second, checksum = _HEAD.unpack_from(part)
        body = part[_HEAD.size :][: first + second]
        if len(body) != first + second or xxhash.xxh3_64_intdigest(body) != checksum:
            raise CorruptError(f"the state of rank {self._slot} alone is damaged")
        targets, at = prepare(self._things, body[:first]), first
        with torch.no_grad():
            for target in filter(torch.Tensor.numel, targets.values()):
                row = torch.frombuffer(bytearray(body[at : at + target.nbytes]), dtype=torch.uint8)
                target.copy_(row.view(target.dtype).view(target.shape))
                at += target.nbytes
        finish(self._things)


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
        if state not in self.states():  # the node has moved, and its former agent has the copy
            serial = ask_for_buffers(self._channel, self._slot, 0, _COPIES, copy=state, own=True)
            fetched = receive_buffers(self._channel, serial) or []
            self._close()
            self._buffers = fetched
        number = [buffer.state for buffer in self._open()].index(state)
        self._newest = number
        return bytes(self._open()[number].file)

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
        self._close()
        try:
            self._buffers = self._ask(size + size // 2 + _ROOM)
        except CheckpointError as error:
            self._buffers, self._refused = [], True
            say(f"{error}: if this process ends, all ranks return to a snapshot")

    def _close(self) -> None:
        for buffer in self._buffers or ():
            buffer.close()

    def _ask(self, size: int) -> list[SnapshotBuffer]:
        serial = ask_for_buffers(self._channel, self._slot, size, _COPIES, own=True)
        return receive_buffers(self._channel, serial) or []
