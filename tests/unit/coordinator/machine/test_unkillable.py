"""Processes that stay in the kernel after SIGKILL: the job continues without them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from jobs.driver import Driver, spec_of
from waiting import finished

from rekindle import names
from rekindle.agent.node_state import NodeState
from rekindle.agent.ranks import RankSupervisor
from rekindle.coordinator.machine.endings import STOP_GRACE_S
from rekindle.coordinator.machine.job_state import Phase
from rekindle.names import KILLED_S
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import RankActivity
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy


def unkillable(policy: Policy | None = None) -> Driver:
    """Return a job of two nodes in which rank 1 hangs in the kernel and SIGKILL has no effect."""
    driver = Driver(nodes=2, processes=1, policy=policy or Policy())
    driver.train(finished=5)
    driver.say(1, p.RankStalled(rank=1, generation=driver.machine.job.generation))
    for node, order in driver.sent_by_node(p.InspectRanks).items():
        fields = {"finished": 5, "doing": RankActivity.STEP, "elapsed_s": 12.0, "limit_s": 10.0}
        inspection = p.RankInspection(rank=node, waiting=node != 1, **fields)
        driver.say(node, p.RanksInspected(serial=order.serial, looks=(inspection,)))
    return driver


def test_a_culprit_that_the_kernel_holds_costs_its_node() -> None:
    """If SIGKILL does not end the hung rank, its node is replaced like a lost node."""
    driver = unkillable()
    assert driver.doomed == [1]
    driver.arrive([0], finished=5)
    assert driver.timers["end"] == KILLED_S
    line = driver.nodes[1]
    driver.fire("end")
    assert [(c.connection, c.message) for c in driver.sent(p.EndAgent)] == [
        (line, p.EndAgent(status=1))
    ]
    fault = driver.last(journal.FaultSeen).fault
    assert (fault.kind, fault.node) == (FaultKind.NODE_LOST, 1)
    assert "rank 1 did not end within 30 s of SIGKILL" in fault.message
    assert driver.last(journal.Decided).strategy is Strategy.RECOVER
    assert driver.last(journal.NodeWanted).node == 1
    driver.nodes.pop(1)
    driver._forget(1)
    driver.machine.losses.on_agent_lost(line, driver.now)  # the agent ends
    driver.collect()
    driver.hello(1)
    driver.spawned()
    driver.form(finished=5)
    assert driver.phase is Phase.TRAINING


def test_a_restart_does_not_wait_for_a_rank_that_the_kernel_holds() -> None:
    """A restart does not wait for the rank: another agent becomes its node. All ranks restart."""
    driver = unkillable(Policy(strategies=(Strategy.HANG_RESTART,)))
    assert driver.phase is Phase.RESTARTING
    driver.exits(0, signal=15)
    assert driver.timers["end"] == STOP_GRACE_S + KILLED_S
    driver.fire("end")
    driver.nodes.pop(1)
    driver._forget(1)
    assert driver.phase is Phase.GATHERING
    assert driver.last(journal.NodeWanted).node == 1
    driver.hello(1)
    driver.store_up()
    driver.spawned()
    driver.form(finished=5)
    assert driver.phase is Phase.TRAINING


def test_a_stop_does_not_wait_for_a_rank_that_the_kernel_holds() -> None:
    """A stop does not wait for the rank.

    Its agent stays, because it may have the final checkpoint.
    """
    driver = unkillable()
    driver.stop()
    driver.exits(0, signal=15)
    assert driver.phase is Phase.STOPPING
    driver.fire("end")
    assert driver.phase is Phase.ENDED
    assert len(driver.sent(p.EndAgent)) == 2


def test_an_agent_ends_without_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An agent stops waiting for the rank after the time limit, and logs it."""
    nothing: Any = SimpleNamespace(write_final_checkpoint=print, write_parts=print, commit=print)
    ranks = RankSupervisor(spec_of(nodes=1, processes=1), nothing, print, {}, NodeState(1))
    held: Any = SimpleNamespace(rank=0, signal=lambda number: None)
    ranks._ranks[0] = held
    monkeypatch.setattr(names, "KILLED_S", 0.01)
    asyncio.run(finished(ranks.end()))
    assert "ranks [0] did not end after SIGKILL" in capfd.readouterr().err
