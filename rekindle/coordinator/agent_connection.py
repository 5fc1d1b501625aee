"""The websocket of one agent: it sends in order, and finds an agent that is silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from rekindle.console import say
from rekindle.silence import Reaction, Silence, gaps

LOOK_S = 0.25
PING_AFTER = 12  # checks: the coordinator pings an agent after 3 s of silence
LOST_AFTER = 18  # and it closes the connection after 4.5 s: the node is lost

Send = Callable[[bytes], Awaitable[None]]


class AgentConnection:
    """The websocket of one agent.

    The silence of an agent is a number of checks, not of seconds. If the coordinator is busy with
    thousands of agents, it reads the waiting messages before the next check. An agent that sends
    messages therefore never counts as silent.
    """

    def __init__(
        self, socket: web.WebSocketResponse, transport: asyncio.WriteTransport | None
    ) -> None:
        self._socket = socket
        self._transport = transport
        self._queue: asyncio.Queue[tuple[Send, bytes]] = asyncio.Queue()
        self._silence = Silence(ask_after=PING_AFTER, lost_after=LOST_AFTER, every_s=LOOK_S)

    def tell(self, message: bytes) -> None:
        """Queue an encoded message. The connection sends messages in order."""
        self._queue.put_nowait((self._socket.send_bytes, message))

    def answer(self, ping: bytes) -> None:
        """Queue the answer to an agent's ping."""
        self._queue.put_nowait((self._socket.pong, ping))

    async def send_all(self) -> None:
        """Send queued messages until the connection ends."""
        with contextlib.suppress(ConnectionError):
            while True:
                send, data = await self._queue.get()
                await send(data)

    def note_message(self) -> None:
        """Note that a frame has arrived."""
        self._silence.note_message()

    def cut(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def check(self, gap_s: float = 0.0) -> None:
        """Count a check. Ping a silent agent, and close the connection if it remains silent.

        gap_s: the time before the check in which this process did not run.
        """
        verdict = self._silence.check(gap_s)
        if verdict is Reaction.ASK:
            self._queue.put_nowait((self._socket.ping, b""))
        elif verdict is Reaction.LOST:
            text = (
                "the coordinator closed a connection, because the agent sent nothing for "
                f"{LOST_AFTER * LOOK_S:g} s"
            )
            say(text)
            self.cut()


async def watch(connections: Mapping[int, AgentConnection]) -> None:
    """Check all connections every LOOK_S, without an end."""
    async for gap_s in gaps(LOOK_S):
        for connection in connections.values():
            connection.check(gap_s)
