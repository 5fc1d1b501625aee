"""The engine of this machine: which agents it starts."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs.driver import spec_of
from waiting import bound_s, wait_until

from rekindle.engines.hosts import simulated_hosts
from rekindle.engines.local import LocalEngine
from rekindle.errors import JobError, UsageError
from rekindle.job.spec import Endpoint, JobDirectory, KeepsOff, on_this_machine
from rekindle.names import SPARE
from rekindle.recovery.journal.journal import Isolated, NodeJoined


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


def test_one_node_has_the_machine_and_several_have_simulated_hosts() -> None:
    """Only the agent of a real host asks the tools of its devices."""
    for nodes, spares, real in ((1, 0, True), (2, 0, False), (1, 1, False)):
        spec = on_this_machine(spec_of(nodes=nodes, processes=1, spares=spares))
        assert (spec.keeps_off is KeepsOff.ONE_HOST) is real
        assert (simulated_hosts(spec) is None) is real


def test_nothing_starts_on_an_isolated_machine(
    tmp_path: Path, started: list[SimulatedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job does not move onto the same machine, and a later job waits for its repair."""
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path))
    directory = JobDirectory(tmp_path / "job")
    directory.create(on_this_machine(spec_of(nodes=1, processes=1)), logs=False)
    directory.announce(Endpoint(host="127.0.0.1", port=1, pid=1, attempt=0))
    local = LocalEngine(directory)
    local.replace(0)
    started[0].status = 1
    local.learn(Isolated(incident=1, node=0, host=socket.gethostname(), reason="broken"))
    with pytest.raises(JobError, match=r"this machine is isolated \(broken\)"):
        local.replace(0)
    assert len(started) == 1
    with pytest.raises(UsageError, match="run rekindle release-node"):
        LocalEngine(directory).prepare()


@pytest.mark.process
def test_a_stopped_agent_ends_with_its_job(tmp_path: Path) -> None:
    """The end of a job kills its stopped agents. Other agents, and those of other jobs, stay."""
    own = engine(tmp_path)
    agents = [_agent(own.directory.path), _agent(own.directory.path), _agent(tmp_path / "job2")]
    try:
        for agent in (agents[0], agents[2]):
            agent.send_signal(signal.SIGSTOP)
            wait_until(lambda pid=agent.pid: _state(pid) == "T", "the stop of an agent")
        own.release()
        assert agents[0].wait(bound_s()) == -signal.SIGKILL
        assert [agent.poll() for agent in agents[1:]] == [None, None]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


@pytest.mark.process
def test_a_stopped_agent_on_its_way_is_replaced(tmp_path: Path) -> None:
    """An agent that is stopped before it joins would never join, so the engine starts another."""
    local = engine(tmp_path)
    local.replace(1)
    [first] = local.agents
    try:
        first.send_signal(signal.SIGSTOP)
        wait_until(lambda: _state(first.pid) == "T", "the stop of the agent")
        local.replace(1)
        assert first.wait(bound_s()) == -signal.SIGKILL
        assert len(local.agents) == 2
    finally:
        for agent in local.agents:
            agent.kill()
            agent.wait(bound_s())


def _agent(directory: Path) -> subprocess.Popen[bytes]:
    """Start a process with the command line of an agent."""
    waits = [sys.executable, "-c", "input()", "-m", "rekindle.agent.process"]
    return subprocess.Popen([*waits, "--directory", str(directory)], stdin=subprocess.PIPE)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(") ")[2][0]
