"""Sends replicas of this node's snapshots to other nodes, and fetches them again."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rekindle.agent.snapshots import replica_server
from rekindle.agent.snapshots.replica_transport import Credentials
from rekindle.console import say
from rekindle.errors import CheckpointError, StaleError
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.states import StateId

REST_S = 30.0  # the pause after another node failed; each try delays ranks


class ReplicaClient:
    """Follows the plan of the current generation; at its end all transfers stop."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._form: protocol.FormGeneration | None = None  # None: there is no current generation
        self._busy: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # by rank
        self._under_way: set[asyncio.Task[None]] = set()
        self._rests_until = 0.0
        self._failure_reported = False  # a failure in this generation is already reported

    def formed(self, form: protocol.FormGeneration) -> None:
        """Start a generation."""
        self.break_off()
        self._form, self._rests_until, self._failure_reported = form, 0.0, False

    def break_off(self) -> None:
        """End the generation. A rank that waits for its copy must not delay the next generation."""
        self._form = None
        for task in self._under_way:
            task.cancel()

    async def copy(self, rank: int, buffer: SnapshotBuffer, state: StateId) -> None:
        """Send a sealed snapshot to the node that the plan names, if any; training continues."""
        async with self._busy[rank]:
            form = self._form
            replica_node = (
                form.plan[rank].replica_node if form is not None and rank in form.plan else -1
            )
            rests = time.monotonic() < self._rests_until
            if form is None or replica_node < 0 or rests or buffer.state != state:
                return
            work = replica_server.put(
                form.replica_addresses[replica_node],
                self._credentials,
                buffer,
                rank=rank,
                form=form,
            )
            try:
                await self._do(work)
            except StaleError:
                pass  # the next generation copies the snapshots that still count
            except CheckpointError as error:
                self._rests_until = time.monotonic() + REST_S
                if not self._failure_reported:
                    text = (
                        f"node {replica_node} does not hold a replica of rank {rank} after step "
                        f"{state.step}"
                    )
                    say(f"{text}: {error}")
                self._failure_reported = True

    async def fetch(
        self, rank: int, state: StateId, make_room: Callable[[int], Awaitable[SnapshotBuffer]]
    ) -> None:
        """Fetch the copy that the plan names into the buffer that `make_room(bytes)` returns.

        Raises CheckpointError: the copy is unavailable or damaged.
        """
        form = self._form
        node = form.plan[rank].node if form is not None and rank in form.plan else -1
        try:
            if form is None or node < 0:
                raise StaleError(f"rank {rank} does not fetch a replica in the current generation")
            work = replica_server.fetch(
                form.replica_addresses[node], self._credentials, make_room, rank=rank, state=state
            )
            await self._do(work)
        except StaleError as error:
            raise CheckpointError(str(error)) from error

    async def fetch_own(
        self,
        at: protocol.ReplicaAddress,
        rank: int,
        state: StateId,
        make_room: Callable[[int], Awaitable[SnapshotBuffer]],
    ) -> None:
        """Fetch the copy of what a rank shares with no other from the agent that had its place.

        Raises CheckpointError: the copy is unavailable or damaged.
        """
        work = replica_server.fetch(
            at, self._credentials, make_room, rank=rank, state=state, own=True
        )
        try:
            await self._do(work)
        except StaleError as error:
            raise CheckpointError(str(error)) from error

    async def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work as a task. Raises StaleError: the generation has ended during the work."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.wait([task])
        if task.cancelled():
            raise StaleError("the generation ended during the transfer")
        task.result()
