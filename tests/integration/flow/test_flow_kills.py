"""SIGKILL of the flow process at random moments: reruns adopt the job, without a second one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from prefect_side import FlowRun, Served, serve, until
from training_jobs.selection import soak_but

from rekindle.errors import JobError
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import Ended, FirstStep, JobStarted, RanksStarted

SCRIPT = Path(__file__).with_name("scripts") / "steps.py"
NODES = 2


class Killer:
    """Kills the processes of one flow run, one after the other."""

    def __init__(self, served: Served, run: FlowRun, rng: random.Random) -> None:
        self.served = served
        self.run = run
        self.rng = rng
        self.flows: list[int] = []  # processes killed
        self.ranks = 0  # ranks killed

    def next_flow(self) -> psutil.Process:
        """Wait for a flow process that was not killed yet."""

        def look() -> psutil.Process | None:
            found = self.served.flow_process()
            return found if found and found.pid not in self.flows else None

        return until(look, "the flow run is run again")

    def kill(self, flow: psutil.Process) -> None:
        """Kill the process; check that no process of its job exists twice."""
        flow.kill()
        self.flows.append(flow.pid)
        assert self._processes("rekindle.coordinator.process") <= 1
        # The coordinator refuses an agent that was started twice, which takes a moment.
        until(lambda: self._processes("rekindle.agent.process") <= NODES, "no agent is doubled")

    def _processes(self, module: str) -> int:
        """Return the number of the job's processes that run this module."""
        found = 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                found += module in words and str(self.run.directory.path) in words
        return found

    # ---- the moments

    def on_its_way(self) -> None:
        """Kill the flow during its imports, launch or adoption, or a little later."""
        flow = self.next_flow()
        time.sleep(self.rng.uniform(0.0, 8.0))
        self.kill(flow)

    def steering(self) -> None:
        """Kill the flow while it follows the job, or at the start of that."""
        flow = self._steering()
        time.sleep(self.rng.uniform(0.0, 1.0))
        self.kill(flow)

    def recovering(self) -> None:
        """Kill the flow while the job recovers from the loss of a rank."""
        flow = self._steering()
        until(self._trains, "the job trains")
        os.kill(self.rng.choice(self.run.status().ranks).pid, signal.SIGKILL)
        self.ranks += 1
        time.sleep(self.rng.uniform(0.0, 0.5))
        self.kill(flow)

    def releasing(self) -> None:
        """Kill the flow after the job's end, during its report or its exit."""
        flow = self.next_flow()
        until(lambda: self.run.count(Ended) == 1, "the job has ended")
        time.sleep(self.rng.uniform(0.0, 0.5))
        self.kill(flow)

    def _steering(self) -> psutil.Process:
        flow = self.next_flow()
        until(lambda: f"process {flow.pid} on" in self._holder(), "it steers the job")
        return flow

    def _holder(self) -> str:
        try:
            return self.run.status().holder
        except JobError:
            return ""  # no coordinator yet

    def _trains(self) -> bool:
        if not self.run.count(FirstStep):
            return False  # before that, all ranks restart
        closed = [incident.closed for incident in journal.incidents(self.run.history())]
        return all(closed) and all(rank.pid for rank in self.run.status().ranks)


def kill_at_random(served: Served, gate: Path, kills: int, seed: int) -> None:
    """Kill the flow process `kills` times at moments of all kinds; check the job's result."""
    rng = random.Random(seed)
    run = served.start(
        script=str(SCRIPT),
        arguments=[str(gate), str(kills * 120), "0.25"],
        nodes=NODES,
        environment={"OMP_NUM_THREADS": "1"},
    )
    killer = Killer(served, run, rng)
    moments: list[Callable[[], None]] = [killer.on_its_way]  # can be before the job exists
    usual = (killer.on_its_way, killer.steering, killer.recovering)
    moments += [rng.choice(usual) for _ in range(kills - 2)]
    for moment in moments:
        moment()
    killer.next_flow()
    gate.touch()
    killer.releasing()
    until(lambda: run.state().name == "Completed", "the job has succeeded")
    check(run, killer)


def check(run: FlowRun, killer: Killer) -> None:
    """Check for one job, one attempt, restarts of killed ranks only, and complete reports."""
    assert run.count(JobStarted) == 1
    ends = [event for event in run.history() if isinstance(event, Ended)]
    assert [event.outcome for event in ends] == ["succeeded"]
    started = [event.ranks for event in run.history() if isinstance(event, RanksStarted)]
    assert sum(map(len, started)) == NODES + killer.ranks
    assert len(journal.incidents(run.history())) == killer.ranks
    names = run.states()
    assert names.count("Crashed") == names.count("Rescheduling") == len(killer.flows)
    assert run.artifact("progress").data == 100


@pytest.fixture
def alone(served: Served, prefect_api: str) -> Iterator[Served]:
    """Serve a runner without other flow runs."""
    with serve(prefect_api, served.home, "kills") as running:
        yield running


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", soak_but([1, 2], 1))
def test_a_flow_process_killed_at_some_moments(alone: Served, tmp_path: Path, seed: int) -> None:
    """After four kills between launch and release the job succeeds in one attempt."""
    kill_at_random(alone, tmp_path / "gate", 4, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_flow_process_killed_at_thirty_moments(alone: Served, tmp_path: Path) -> None:
    """After thirty kills the job succeeds in one attempt."""
    kill_at_random(alone, tmp_path / "gate", 30, 30)
