"""The agent's copies of the state that a rank shares with no other; they outlive its process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable

from rekindle.agent.snapshots.replica_client import ReplicaClient
from rekindle.errors import CheckpointError
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.states import StateId

Held = list[tuple[int, SnapshotBuffer]]  # the buffers of a rank, with their descriptors
SendGrant = Callable[[protocol.BufferGrant, list[int]], None]


class OwnCopies:
    """The copies of all ranks of one node.

    make: makes buffers for a rank, with their number and their bytes. close: closes these buffers.
    former: the agent that had the node before a move. Its copies are as new as the ranks' states.
    """

    def __init__(
        self,
        make: Callable[[int, int, int], Awaitable[Held]],
        close: Callable[[Held], Awaitable[None]],
        client: ReplicaClient,
    ) -> None:
        self._make, self._close = make, close
        self._client = client
        self._held: dict[int, Held] = {}
        self.former: protocol.ReplicaAddress | None = None

    async def room(self, wanted: protocol.BufferRequest, answer: SendGrant) -> None:
        """Answer a rank with its copies; make larger ones, or fetch one first, if it asks so."""
        held, error = self._held.get(wanted.rank, []), ""
        try:
            if wanted.copy is not None:
                await self._fetch(wanted, wanted.copy)
            elif wanted.bytes > (len(held[0][1].data) if held else 0):
                await self._renew(wanted, wanted.bytes)
        except CheckpointError as failed:
            error = str(failed)
        held = [] if error else self._held.get(wanted.rank, [])
        answer(protocol.BufferGrant(error=error, serial=wanted.serial), [fd for fd, _ in held])

    @contextlib.asynccontextmanager
    async def reading(self, rank: int, state: StateId) -> AsyncIterator[SnapshotBuffer]:
        """Yield the copy of a state, whose rank waits. Raises CheckpointError: there is none."""
        found = [buffer for _, buffer in self._held.get(rank, ()) if buffer.state == state]
        if not found:
            raise CheckpointError(_missing(rank, state))
        yield found[0]

    async def close(self) -> None:
        """Free the memory."""
        for held in self._held.values():
            await self._close(held)

    async def _fetch(self, wanted: protocol.BufferRequest, state: StateId) -> None:
        if self.former is None:
            raise CheckpointError(_missing(wanted.rank, state))
        make_room = functools.partial(self._room_for_copy, wanted)
        await self._client.fetch_own(self.former, wanted.rank, state, make_room)

    async def _room_for_copy(self, wanted: protocol.BufferRequest, size: int) -> SnapshotBuffer:
        await self._renew(wanted, size)
        return self._held[wanted.rank][0][1]

    async def _renew(self, wanted: protocol.BufferRequest, size: int) -> None:
        """Replace the copies of a rank by empty ones. Raises CheckpointError: no memory."""
        try:
            held = await self._make(wanted.rank, wanted.buffers, size)
        except CheckpointError:
            await self._close(self._held.pop(wanted.rank, []))
            raise
        before, self._held[wanted.rank] = self._held.get(wanted.rank, []), held
        await self._close(before)


def _missing(rank: int, state: StateId) -> str:
    return (
        f"there is no copy of the state of rank {rank} alone after step {state.step} of generation "
        f"{state.generation}"
    )
