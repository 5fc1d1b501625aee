"""If the file system of the log directory does not answer, the agent still answers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from jobs.driver import spec_of
from waiting import finished, turns

from rekindle.agent import output
from rekindle.agent.node_state import NodeState
from rekindle.agent.ranks import RankSupervisor
from rekindle.errors import RekindleError
from rekindle.protocol import agent as p

SPAWN = p.Spawn(
    generation=1, restart=0, ranks=(0,), world_size=1, first=0, store_host="", store_port=0
)


class Node:
    """A node whose log of rank 0 is a named pipe: `open` waits for a reader."""

    def __init__(self, folder: Path) -> None:
        spec = msgspec.structs.replace(
            spec_of(nodes=1, processes=1),
            directory=str(folder),
            log_directory=str(folder / "logs"),
        )
        self.log = folder / "logs/attempt_0/0/stdout.log"
        self.log.parent.mkdir(parents=True)
        os.mkfifo(self.log)
        self.sent: list[p.Message] = []
        snapshots: Any = SimpleNamespace(
            write_final_checkpoint=print, write_parts=print, commit=print
        )
        self.ranks = RankSupervisor(spec, snapshots, self.sent.append, {}, NodeState(1))
        self.ranks.fork = self._fork  # type: ignore[method-assign]

    async def _fork(self, *_: object) -> int:
        raise RekindleError("the logs are open")

    def answer(self) -> None:
        """Let the file system answer."""
        os.close(os.open(self.log, os.O_RDONLY | os.O_NONBLOCK))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_event_loop_runs_while_a_log_is_opened(node: Node) -> None:
    """While the agent opens a log, its event loop runs, so it answers pings and stays alive."""

    async def start() -> None:
        order = asyncio.create_task(node.ranks.handle(SPAWN))
        await turns()
        assert not order.done()
        reader = os.open(node.log, os.O_RDONLY | os.O_NONBLOCK)
        await finished(order)
        os.close(reader)

    asyncio.run(start())
    assert node.sent == [p.SpawnFailed(rank=0, error="the logs are open")]


def test_a_log_that_is_not_opened_in_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a log does not open in time, the coordinator gets an error with the directory's name."""
    monkeypatch.setattr(output, "LOGS_S", 0.01)
    asyncio.run(finished(node.ranks.handle(SPAWN)))
    (failed,) = node.sent
    assert isinstance(failed, p.SpawnFailed)
    assert str(node.log.parent) in failed.error
    assert "did not answer" in failed.error
    node.answer()
