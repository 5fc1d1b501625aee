"""The coordinator's connections: silent agents, and agents that only seem silent to a busy loop."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from aiohttp import web
from waiting import turns

from rekindle.coordinator.agent_connection import (
    LOOK_S,
    LOST_AFTER,
    PING_AFTER,
    AgentConnection,
    watch,
)


class Socket:
    """A websocket that records the data that was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []

    async def send_bytes(self, data: bytes) -> None:
        self.sent.append(("message", data))

    async def ping(self, data: bytes) -> None:
        self.sent.append(("ping", data))

    async def pong(self, data: bytes) -> None:
        self.sent.append(("pong", data))


class Transport:
    """A transport that records whether it was aborted."""

    cut = False

    def abort(self) -> None:
        self.cut = True


def simulated() -> tuple[AgentConnection, Socket, Transport]:
    """Return a connection without a network."""
    socket, transport = Socket(), Transport()
    connection = AgentConnection(cast(web.WebSocketResponse, socket), cast(Any, transport))
    return connection, socket, transport


async def sent_by(connection: AgentConnection) -> None:
    """Let the connection send its whole queue."""
    task = asyncio.create_task(connection.send_all())
    await turns()
    task.cancel()


def test_a_silent_agent_is_asked_and_then_cut_off() -> None:
    """A silent agent gets a ping after 3 s, and its connection ends after 4.5 s."""

    async def run() -> None:
        connection, socket, transport = simulated()
        for _ in range(LOST_AFTER - 1):
            connection.check()
        await sent_by(connection)
        assert socket.sent == [("ping", b"")]
        assert not transport.cut
        connection.check()
        assert transport.cut

    asyncio.run(run())
    assert (PING_AFTER * LOOK_S, LOST_AFTER * LOOK_S) == (3.0, 4.5)


def test_whoever_says_something_is_not_asked() -> None:
    """A heartbeat every 2 s, the slowest rate, makes pings unnecessary."""

    async def run() -> None:
        connection, socket, transport = simulated()
        for look in range(100):
            connection.check()
            if look % 8 == 0:
                connection.note_message()
        await sent_by(connection)
        assert socket.sent == []
        assert not transport.cut

    asyncio.run(run())


def test_all_is_sent_in_order() -> None:
    """Messages and answers to pings keep their order."""

    async def run() -> None:
        connection, socket, _ = simulated()
        connection.tell(b"first")
        connection.answer(b"ping")
        connection.tell(b"last")
        await sent_by(connection)
        assert socket.sent == [("message", b"first"), ("pong", b"ping"), ("message", b"last")]

    asyncio.run(run())


def test_a_busy_coordinator_takes_nobody_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy period of the event loop counts as one check, whatever its length."""

    async def run() -> None:
        connection, socket, transport = simulated()
        loop = asyncio.get_running_loop()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now)
        watching = asyncio.create_task(watch({1: connection}))
        await turns()
        now += LOOK_S * (PING_AFTER + 1)  # the time in which the loop is busy
        await turns()
        watching.cancel()
        await sent_by(connection)
        assert socket.sent == []
        assert not transport.cut

    asyncio.run(run())
