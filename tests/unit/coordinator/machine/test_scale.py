"""The cost of an event per agent does not grow with the number of agents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from jobs.driver import Driver
from jobs.trained import SIGKILL

import rekindle
from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.policy.plan import AvailableState, make_plan
from rekindle.recovery.policy.policy import Policy

SMALL, BIG = 32, 128
PACKAGE = str(Path(rekindle.__file__).parent)
POLICY = Policy(max_recoveries=1000)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the driver's check of every rank after every event. It is not the machine's work."""
    monkeypatch.setattr("jobs.driver.check_counts", lambda roster: None)


@contextmanager
def work() -> Iterator[list[int]]:
    """Count the instructions that the package runs, which are the same on every computer."""
    count = [0]

    def inside(frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        count[0] += event == "opcode"
        return inside

    def enter(frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return inside

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield count
    finally:
        sys.settrace(before)


def trained(nodes: int) -> Driver:
    driver = Driver(nodes=nodes, processes=1, policy=POLICY)
    driver.train()
    return driver


def start(nodes: int) -> None:
    """Start a job in which all ranks finish a step."""
    trained(nodes)


def start_unnumbered(nodes: int) -> None:
    """Connect all agents without a node number."""
    driver = Driver(nodes=nodes, processes=1, policy=POLICY)
    for _ in range(nodes):
        driver.hello()


def lose_a_rank(driver: Driver) -> None:
    """Kill a rank and let it recover."""
    driver.exits(1, signal=SIGKILL)
    driver.spawned()
    driver.form(1)
    driver.step(2)


def lose_a_node(driver: Driver) -> None:
    """Lose a node and replace it with another agent."""
    driver.lose(1)
    driver.hello(1)
    driver.spawned()
    driver.form(1)
    driver.step(2)


def ranks_end_well(driver: Driver) -> None:
    """Let all ranks exit with status 0, one after the other."""
    for rank in driver.ranks:
        driver.exits(rank, code=0, finished=1)


def stop(driver: Driver) -> None:
    """Stop the job and let all ranks end, one after the other."""
    driver.stop()
    driver.killed()


def lose_half_the_state(nodes: int) -> None:
    """Plan a recovery in which half of the ranks get their state from the other half."""
    make_plan({r: AvailableState(node=r, live=(3, 1) if r % 2 else None) for r in range(nodes)})


@pytest.mark.parametrize(
    "do", [start, start_unnumbered, lose_half_the_state], ids=lambda do: do.__name__
)
def test_beginnings_cost_each_agent_the_same(do: Callable[[int], None]) -> None:
    """Four times as many agents cause four times as much work at the start, not sixteen times."""
    costs = []
    for nodes in (SMALL, BIG):
        with work() as count:
            do(nodes)
        costs += count
    assert costs[1] < costs[0] * BIG / SMALL * 1.3


@pytest.mark.parametrize(
    "do", [lose_a_rank, lose_a_node, ranks_end_well, stop], ids=lambda do: do.__name__
)
def test_events_cost_each_agent_the_same(do: Callable[[Driver], None]) -> None:
    """Four times as many agents cause four times as much work per event, not sixteen times."""
    costs = []
    for nodes in (SMALL, BIG):
        driver = trained(nodes)
        with work() as count:
            do(driver)
        costs += count
    assert costs[1] < costs[0] * BIG / SMALL * 1.3


def test_a_message_is_one_object_for_all() -> None:
    """A message to all agents is one object, so it is encoded once."""
    driver = trained(SMALL)
    driver.exits(1, signal=SIGKILL)
    overs = driver.sent(p.GenerationEnded)
    assert driver.phase is Phase.REGROUPING
    assert len(overs) == SMALL
    assert len({id(send.message) for send in overs}) == 1
