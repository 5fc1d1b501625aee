"""Messages of an agent to its coordinator: one bad message does not affect the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from jobs.driver import spec_of
from waiting import turn_until

from rekindle.agent.process import Agent
from rekindle.checkpoints.open_store import open_store
from rekindle.errors import UnexpectedError
from rekindle.job.spec import JobDirectory
from rekindle.names import WIRE_VERSION
from rekindle.profiling.steps import StepTimes
from rekindle.profiling.switch import Switch
from rekindle.protocol import agent as p

SPOILT = p.StepTimings(steps={0: (StepTimes(step=1, start=2**70, seconds=1.0, own=1.0),)})
GOOD = p.Heartbeat(finished={0: 7})
SWITCH = p.ProfilingSwitchRead(switch=Switch())


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    """Return an agent that has not started any work."""
    spec = msgspec.structs.replace(
        spec_of(nodes=1, processes=1),
        directory=str(tmp_path),
        log_directory=str(tmp_path / "logs"),
        checkpoint_store=str(tmp_path / "checkpoints"),
    )
    directory = JobDirectory(tmp_path)
    directory.create(spec)
    hello = p.Hello(
        job_id=spec.job_id,
        attempt=0,
        version=WIRE_VERSION,
        node=0,
        spare=False,
        address="127.0.0.1",
        pid=1,
        processes=1,
    )
    return Agent(directory, spec, open_store(spec.checkpoint_store), "secret", hello)


class Line:
    """A connection to a silent coordinator.

    fails: called for each message after the first one.
    """

    close_code: int | None = None

    def __init__(self, fails: Callable[[], None] = lambda: None) -> None:
        self.sent: list[p.Message] = []
        self._fails = fails
        self._tries = 0
        self._cut = asyncio.Event()

    async def has_tried(self, count: int) -> None:
        """Wait until the agent has tried to send `count` messages."""
        await turn_until(lambda: self._tries >= count, f"{count} messages")

    def cut(self) -> None:
        """Close the connection."""
        self._cut.set()

    async def send_bytes(self, data: bytes) -> None:
        self._tries += 1
        if self.sent:
            self._fails()
        self.sent.append(p.decode_from_agent(data))

    def __aiter__(self) -> Line:
        return self

    async def __anext__(self) -> None:
        await self._cut.wait()
        raise StopAsyncIteration


async def serve(agent: Agent, line: Line) -> bool:
    """Serve this connection until it closes."""
    return await asyncio.create_task(agent._serve(line, asyncio.Queue()))  # type: ignore[arg-type]


def test_what_cannot_be_encoded_fails_where_it_is_said(agent: Agent) -> None:
    """A message that cannot be encoded raises in its sender, and later messages still arrive."""

    async def speak() -> Line:
        line = Line()
        serving = asyncio.create_task(serve(agent, line))
        await line.has_tried(1)
        with pytest.raises(OverflowError):
            agent.send(SPOILT)
        agent.send(GOOD)
        await line.has_tried(2)
        line.cut()
        assert not await serving
        return line

    assert asyncio.run(speak()).sent[1:] == [GOOD]


def test_an_agent_that_cannot_speak_any_more_ends(agent: Agent) -> None:
    """If sending fails with a bug, the agent raises an error that names the task.

    It does not keep an open connection without messages.
    """

    def fail() -> None:
        raise RuntimeError("a bug")

    async def speak() -> None:
        line = Line(fail)
        serving = asyncio.create_task(serve(agent, line))
        await line.has_tried(1)
        agent.send(GOOD)
        await serving

    with pytest.raises(UnexpectedError, match="the task 'sender' failed: RuntimeError"):
        asyncio.run(speak())


def test_a_line_that_is_cut_while_something_is_sent_ends_nobody(agent: Agent) -> None:
    """If the connection breaks during a message, the agent waits for the next coordinator."""

    def fail() -> None:
        raise ConnectionResetError

    async def speak() -> bool:
        line = Line(fail)
        serving = asyncio.create_task(serve(agent, line))
        await line.has_tried(1)
        agent.send(GOOD)
        await line.has_tried(2)
        line.cut()
        return await serving

    assert not asyncio.run(speak())


def test_what_a_switch_says_waits_for_a_coordinator(agent: Agent) -> None:
    """Without a coordinator, the agent keeps a switch's content for the next one, but no heartbeat.

    The agent reads the switch once only.
    """
    agent.send(GOOD)
    agent.send(SWITCH)

    async def speak() -> Line:
        line = Line()
        serving = asyncio.create_task(serve(agent, line))
        await line.has_tried(2)
        line.cut()
        await serving
        return line

    assert asyncio.run(speak()).sent[1:] == [SWITCH]


def test_a_heartbeat_of_each_generation_and_connection(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent sends the finished steps of ranks that have their state, and never waits for more.

    A generation may begin at an earlier step, and reach the same step within one interval. After
    its last step a rank arrives, and the agent still sends its metrics.
    """
    live: Any = {0: SimpleNamespace(rank=0, pid=1)}
    nobody: Any = None
    monkeypatch.setattr(agent.ranks, "_ranks", live)
    page = agent.ranks._pages.of(0)[1]
    page.beat(3)
    page.total = 9
    early = p.Heartbeat(finished={}, total=9)
    beat = p.Heartbeat(finished={0: 3}, total=9)
    last = p.Heartbeat(finished={}, total=9, metrics={"loss": 0.5})
    failed = p.StateReady(rank=0, generation=1, finished=0, error="no checkpoint")
    ready = p.StateReady(rank=0, generation=1, finished=3)
    arrived = p.Arrived(rank=0, generation=1)

    async def speak() -> list[list[p.Message]]:
        first, second = Line(), Line()
        beating = asyncio.create_task(agent._beat())
        serving = asyncio.create_task(serve(agent, first))
        await first.has_tried(1)
        agent.ranks._on_message(nobody, failed)
        await first.has_tried(3)
        agent.ranks._on_message(nobody, ready)
        await first.has_tried(5)
        agent.state.generation = 2
        await first.has_tried(6)
        first.cut()
        await serving
        serving = asyncio.create_task(serve(agent, second))
        await second.has_tried(2)
        page.put_record(b'{"metrics": {"loss": 0.5}}')
        agent.ranks._on_message(nobody, arrived)
        await second.has_tried(4)
        second.cut()
        await serving
        beating.cancel()
        return [first.sent[1:], second.sent[1:]]

    first, second = asyncio.run(speak())
    assert first == [failed, early, ready, beat, beat]
    assert second == [beat, arrived, last]


def test_a_record_that_stays_unreadable_is_reported_once(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script can write to its page. The agent still sends the steps, and reports the record.

    A record that is incomplete once is one that its rank is writing.
    """
    live: Any = {0: SimpleNamespace(rank=0, pid=1)}
    monkeypatch.setattr(agent.ranks, "_ranks", live)
    page = agent.ranks._pages.of(0)[1]
    page.total = 9
    beat = p.Heartbeat(finished={}, total=9)
    for record in (b'{"metrics"', b'{"metrics": [1]}', b'{"metrics": {"a": 1' + b"0" * 400 + b"}}"):
        page.put_record(record)
        assert agent.ranks.beat() == beat
    assert capfd.readouterr().err == ""
    for _ in range(3):
        assert agent.ranks.beat() == beat
    text = "the agent cannot read a step record: it is not a step record: int too"
    assert capfd.readouterr().err.count(text) == 1
