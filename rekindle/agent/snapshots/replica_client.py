"""Has other nodes keep replicas of this node's snapshots, and fetches them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rekindle.agent.snapshots import replica_server
from rekindle.agent.snapshots.replica_transport import Credentials
from rekindle.agent.threads import in_background
from rekindle.errors import CheckpointError, StaleError
from rekindle.protocol import agent as protocol
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.recovery.policy.plan import Made

REST_S = 30.0  # for which another node that failed is left alone: ranks wait for their copies


class ReplicaClient:
    """Follows the plan of the generation that goes on; with its end all is broken off."""

    def __init__(self, known: Credentials) -> None:
        self._known = known
        self._form: protocol.FormGeneration | None = None  # None: no generation goes on
        self._busy: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # by rank
        self._under_way: set[asyncio.Task[None]] = set()
        self._rests_until = 0.0
        self._said = False  # in this generation: that copies fail

    def formed(self, form: protocol.FormGeneration) -> None:
        """A generation begins."""
        self.break_off()
        self._form, self._rests_until, self._said = form, 0.0, False

    def break_off(self) -> None:
        """The generation is over; a rank that waits for its copy must not be late for the next."""
        self._form = None
        for task in self._under_way:
            task.cancel()

    async def copy(self, rank: int, buffer: SnapshotBuffer, made: Made) -> None:
        """Have a sealed snapshot kept where the plan says, if it does; training needs it not."""
        async with self._busy[rank]:
            form = self._form
            replica_node = (
                form.plan[rank].replica_node if form is not None and rank in form.plan else -1
            )
            rests = time.monotonic() < self._rests_until
            if form is None or replica_node < 0 or rests or buffer.made != made:
                return
            work = replica_server.put(
                form.replica_addresses[replica_node], self._known, buffer, rank=rank, form=form
            )
            try:
                await self._do(work)
            except StaleError:
                pass  # what still counts of it is copied in the next generation
            except CheckpointError as error:
                self._rests_until = time.monotonic() + REST_S
                if not self._said:
                    text = f"node {replica_node} keeps no copy of rank {rank} after step {made[0]}"
                    print(f"rekindle agent: {text}: {error}", file=sys.stderr, flush=True)
                self._said = True

    async def fetch(
        self, rank: int, made: Made, make_room: Callable[[int], Awaitable[SnapshotBuffer]]
    ) -> None:
        """Bring the copy that the plan names into the buffer that `make_room(bytes)` returns.

        Raises CheckpointError: it cannot be had, or is damaged.
        """
        form = self._form
        node = form.plan[rank].node if form is not None and rank in form.plan else -1
        try:
            if form is None or node < 0:
                raise StaleError(f"no generation goes on in which rank {rank} fetches a copy")
            work = replica_server.fetch(
                form.replica_addresses[node], self._known, make_room, rank=rank, made=made
            )
            await self._do(work)
        except StaleError as error:
            raise CheckpointError(str(error)) from error

    async def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it done in a task. Raises StaleError: the generation has ended meanwhile."""
        task = in_background(work, self._under_way)
        await asyncio.wait([task])
        if task.cancelled():
            raise StaleError("the generation has ended meanwhile")
        task.result()
