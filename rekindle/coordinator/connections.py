"""The coordinator's connections to its agents: it sends messages and finds silent agents."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

LOOK_S = 0.25
PING_AFTER = 12  # looks: an agent that says nothing for 3 s is asked
LOST_AFTER = 18  # and its node is lost when it says nothing for 4.5 s

Send = Callable[[bytes], Awaitable[None]]


class Line:
    """One agent's websocket.

    Silence is counted in looks at the line, not in seconds. What an agent says while we are busy
    with thousands of others is read before the next look, so it does not count as silent.
    """

    def __init__(
        self, socket: web.WebSocketResponse, transport: asyncio.WriteTransport | None
    ) -> None:
        self._socket = socket
        self._transport = transport
        self._queue: asyncio.Queue[tuple[Send, bytes]] = asyncio.Queue()
        self._looks = 0  # since it was heard

    def tell(self, message: bytes) -> None:
        """Send an encoded message, in order."""
        self._queue.put_nowait((self._socket.send_bytes, message))

    def answer(self, ping: bytes) -> None:
        """Tell the agent that we are there."""
        self._queue.put_nowait((self._socket.pong, ping))

    async def send_all(self) -> None:
        """Send what there is to tell until the line is cut."""
        with contextlib.suppress(ConnectionError):
            while True:
                send, data = await self._queue.get()
                await send(data)

    def heard(self) -> None:
        """Note that something has come."""
        self._looks = 0

    def look(self) -> None:
        """Count the silence; in the end, cut the line."""
        self._looks += 1
        if self._looks == PING_AFTER:
            self._queue.put_nowait((self._socket.ping, b""))
        elif self._looks == LOST_AFTER and self._transport is not None:
            text = f"line cut: an agent was silent for {LOST_AFTER * LOOK_S:g} s"
            print(f"rekindle coordinator: {text}", file=sys.stderr, flush=True)
            self._transport.abort()


async def watch(lines: Mapping[int, Line]) -> None:
    """Look at all lines, for ever."""
    while True:
        await asyncio.sleep(LOOK_S)
        for line in lines.values():
            line.look()
