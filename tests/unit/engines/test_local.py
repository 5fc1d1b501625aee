"""The engine of this machine: which agents it starts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from jobs.driver import spec_of

from rekindle.engines.local import LocalEngine
from rekindle.job.spec import Endpoint, JobDirectory
from rekindle.names import SPARE
from rekindle.recovery.journal.journal import NodeJoined


class SimulatedProcess:
    """A process that runs until a test sets `status`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedProcess]:
    """Return the processes that the engine starts."""
    found: list[SimulatedProcess] = []

    def start(*_: Any, **__: Any) -> SimulatedProcess:
        found.append(SimulatedProcess(100 + len(found)))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


def engine(folder: Path) -> LocalEngine:
    directory = JobDirectory(folder / "job")
    directory.create(spec_of(nodes=2, processes=1), logs=False)
    directory.announce(Endpoint(host="127.0.0.1", port=1, pid=1, attempt=0))
    return LocalEngine(directory)


def test_one_agent_for_a_node_is_on_its_way(
    tmp_path: Path, started: list[SimulatedProcess]
) -> None:
    """The engine starts no second agent for a node before the first one has joined or ended."""
    local = engine(tmp_path)
    local.replace(1)
    local.replace(1)
    assert len(started) == 1
    local.learn(NodeJoined(node=1, address="127.0.0.1", pid=started[0].pid))
    local.replace(1)
    assert len(started) == 2
    started[1].status = -9
    local.replace(1)
    assert len(started) == 3


def test_each_request_for_a_spare_starts_one(
    tmp_path: Path, started: list[SimulatedProcess]
) -> None:
    """Two requests for a spare start two spares, because they are not for the same place."""
    local = engine(tmp_path)
    local.replace(SPARE)
    local.replace(SPARE)
    assert len(started) == 2
