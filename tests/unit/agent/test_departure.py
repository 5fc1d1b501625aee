"""The end of an agent that a signal demands: with its coordinator, alone, or as a lost node."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace

import pytest
from waiting import finished, turn_until, turns

from rekindle.agent import departure
from rekindle.agent.departure import Departure
from rekindle.protocol import agent as p


class Node:
    """An agent with a rank and a snapshot.

    answers: whether the coordinator answers a ping. ended: for each end, whether it was at once.
    """

    def __init__(
        self, *, job_ends: bool = False, connected: bool = True, answers: bool = True
    ) -> None:
        self.answers = answers
        self.link = SimpleNamespace(
            is_open=connected, answered_at=0.0, job_ends=False, ask=self._ask
        )
        self.ended: list[bool] = []
        self.signals: list[int] = []
        rank = SimpleNamespace(pid=1, signal=self.signals.append)
        self.ranks = SimpleNamespace(
            job_ends=job_ends, live=[rank], is_sharded=False, all_gone=self._all_gone
        )
        self.written = 0
        self.snapshots = SimpleNamespace(kept={0: ()}, write_alone=self._write_alone)
        self.departure = Departure(
            self.ranks, self.snapshots, link=self.link, end=self.ended.append, write_limit_s=0.05
        )

    async def _ask(self) -> None:
        if self.answers:
            self.link.answered_at = asyncio.get_running_loop().time()

    async def _all_gone(self) -> None:
        self.ranks.live = []

    async def _write_alone(self) -> p.CheckpointWritten:
        self.written += 1
        return p.CheckpointWritten(step=1, generation=1, path="/store/step-1")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure, "_TICK_S", 0.001)
    for name in ("CONTINUES_S", "SILENT_S", "ASK_EVERY_S"):
        monkeypatch.setattr(departure, name, 0.002)


async def _after_demand(node: Node) -> None:
    node.departure.demand()
    await turn_until(lambda: node.ended, "the end of the agent")


def test_a_node_that_leaves_a_job_ends_at_once() -> None:
    """If the coordinator does not end the job, the agent ends as a lost node."""
    node = Node()
    asyncio.run(finished(_after_demand(node)))
    assert not node.departure.is_alone


def test_a_node_whose_coordinator_does_not_answer_is_alone() -> None:
    """A coordinator that hangs gives no orders, so the agent keeps the state itself."""
    node = Node(answers=False)
    asyncio.run(finished(_after_demand(node)))
    assert node.departure.is_alone


def test_a_coordinator_that_ends_the_job_gives_orders() -> None:
    """Its orders may wait for the journal, so the agent waits while the answers say that."""

    async def run(node: Node) -> None:
        node.link.job_ends = True
        node.departure.demand()
        await turns(200)
        assert node.ended == []
        node.link.is_open = False
        await turn_until(lambda: node.ended, "the end of the agent")

    node = Node()
    asyncio.run(finished(run(node)))
    assert node.departure.is_alone


def test_a_store_that_hangs_does_not_hold_the_agent() -> None:
    """The write of the final checkpoint has a limit."""

    async def run(node: Node) -> bool:
        node.snapshots.write_alone = asyncio.Event().wait
        return await node.departure.end_alone()

    assert not asyncio.run(finished(run(Node(connected=False))))


def test_a_node_of_a_job_that_ends_waits_for_its_coordinator() -> None:
    """While the coordinator ends the job, the agent carries out its orders, also after a SIGTERM.

    If the coordinator is lost then, the agent ends alone. The ranks got SIGTERM already.
    """

    async def run(node: Node) -> None:
        node.departure.demand()
        await turns(200)
        node.departure.demand()
        assert node.ended == []
        node.link.is_open = False
        await turn_until(lambda: node.ended, "the end of the agent")
        await node.departure.end_alone()

    node = Node(job_ends=True)
    asyncio.run(finished(run(node)))
    assert node.departure.is_alone
    assert (node.signals, node.written) == ([], 1)


def test_a_node_without_a_coordinator_ends_its_ranks_and_keeps_their_state(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Without a coordinator the ranks get SIGTERM, and the agent writes the newest snapshot."""

    async def run(node: Node) -> None:
        await _after_demand(node)
        await node.departure.end_alone()

    node = Node(connected=False)
    asyncio.run(finished(run(node)))
    assert (node.signals, node.written) == ([signal.SIGTERM], 1)
    assert "/store/step-1" in capfd.readouterr().err
    sharded = Node(connected=False)
    sharded.ranks.is_sharded = True
    asyncio.run(finished(run(sharded)))
    assert sharded.written == 0
    assert "shards" in capfd.readouterr().err


def test_a_second_interrupt_ends_at_once() -> None:
    """The second SIGINT does not wait for the coordinator."""

    async def run(node: Node) -> None:
        node.departure.demand_twice()
        await turns(10)
        assert node.ended == []
        node.departure.demand_twice()
        assert node.ended == [True]

    asyncio.run(finished(run(Node(job_ends=True))))


def test_a_signal_for_ranks_without_a_handler_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks with a handler get SIGUSR1. It would end other ranks, so the agent prints a line."""
    node = Node()
    monkeypatch.setattr(departure, "catches", lambda pid, number: True)
    node.departure.pass_on(signal.SIGUSR1)
    assert node.signals == [signal.SIGUSR1]
    monkeypatch.setattr(departure, "catches", lambda pid, number: False)
    node.departure.pass_on(signal.SIGUSR1)
    assert node.signals == [signal.SIGUSR1]
    assert "SIGUSR1 has no effect" in capfd.readouterr().err
