"""The coordinator's lines: who is silent, and who only seems so because we were busy."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from aiohttp import web
from waiting import turns

from rekindle.coordinator.process import LOOK_S, LOST_AFTER, PING_AFTER, AgentConnection, watch


class Socket:
    """A websocket that remembers what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []

    async def send_bytes(self, data: bytes) -> None:
        self.sent.append(("message", data))

    async def ping(self, data: bytes) -> None:
        self.sent.append(("ping", data))

    async def pong(self, data: bytes) -> None:
        self.sent.append(("pong", data))


class Transport:
    """A transport that remembers whether it was cut."""

    cut = False

    def abort(self) -> None:
        self.cut = True


def simulated() -> tuple[AgentConnection, Socket, Transport]:
    """A line without a network."""
    socket, transport = Socket(), Transport()
    line = AgentConnection(cast(web.WebSocketResponse, socket), cast(Any, transport))
    return line, socket, transport


async def sent_by(line: AgentConnection) -> None:
    """Let the line send all that it has to."""
    task = asyncio.create_task(line.send_all())
    await turns()
    task.cancel()


def test_a_silent_agent_is_asked_and_then_cut_off() -> None:
    """A ping after 3 s, the end of the line after 4.5 s."""

    async def run() -> None:
        line, socket, transport = simulated()
        for _ in range(LOST_AFTER - 1):
            line.look()
        await sent_by(line)
        assert socket.sent == [("ping", b"")]
        assert not transport.cut
        line.look()
        assert transport.cut

    asyncio.run(run())
    assert (PING_AFTER * LOOK_S, LOST_AFTER * LOOK_S) == (3.0, 4.5)


def test_whoever_says_something_is_not_asked() -> None:
    """A beat every 2 s, the slowest there is, spares the pings."""

    async def run() -> None:
        line, socket, transport = simulated()
        for look in range(100):
            line.look()
            if look % 8 == 0:
                line.heard()
        await sent_by(line)
        assert socket.sent == []
        assert not transport.cut

    asyncio.run(run())


def test_all_is_sent_in_order() -> None:
    """Messages and answers to pings go out as they were given."""

    async def run() -> None:
        line, socket, _ = simulated()
        line.tell(b"first")
        line.answer(b"ping")
        line.tell(b"last")
        await sent_by(line)
        assert socket.sent == [("message", b"first"), ("pong", b"ping"), ("message", b"last")]

    asyncio.run(run())


def test_a_busy_coordinator_takes_nobody_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it was busy, it counts as one look."""

    async def run() -> None:
        line, socket, transport = simulated()
        loop = asyncio.get_running_loop()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now)
        watching = asyncio.create_task(watch({1: line}))
        await turns()
        now += LOOK_S * (PING_AFTER + 1)  # the time in which the loop is busy
        await turns()
        watching.cancel()
        await sent_by(line)
        assert socket.sent == []
        assert not transport.cut

    asyncio.run(run())
