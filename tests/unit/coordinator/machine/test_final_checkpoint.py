"""The final checkpoint of a job that did not succeed."""

from __future__ import annotations

from jobs.driver import Driver

from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import INNER, Policy, Strategy


def trained(*, policy: Policy | None = None, **snapshots: int) -> Driver:
    """Return a job of two nodes that trains. `node0=5` gives node 0 a snapshot of step 5."""
    driver = Driver(nodes=2, processes=1, policy=policy)
    driver.train(finished=7)
    for name, step in snapshots.items():
        node = int(name.removeprefix("node"))
        driver.say(node, p.Snapshots(kept={node: ((step, 1),)}))
    return driver


def broken(driver: Driver) -> None:
    """Let the script raise when no restart is left."""
    driver.raises(1)
    driver.killed()


def asked(driver: Driver) -> dict[int, int]:
    """Return the step of the snapshot that the last commands ordered from each node."""
    return {node: dump.step for node, dump in driver.sent_by_node(p.WriteFinalCheckpoint).items()}


def answer(driver: Driver, node: int, step: int, error: str = "") -> None:
    """Let a node report that it has written the final checkpoint, or its error."""
    path = "" if error else "there"
    driver.say(
        node, p.CheckpointWritten(step=step, generation=1, path=path, error=error, final=True)
    )


def test_the_newest_snapshot_is_written() -> None:
    """The newest snapshot is written after all ranks have ended and before the job ends."""
    driver = trained(node0=5, node1=6)
    driver.raises(1)
    assert asked(driver) == {}
    driver.killed()
    assert asked(driver) == {1: 6}
    assert (driver.phase, driver.outcome) == (Phase.FINAL_CHECKPOINT, None)
    answer(driver, 1, 6)
    assert driver.outcome is False
    assert driver.last(journal.Checkpointed).step == 6
    assert driver.last(journal.Decided).strategy is Strategy.DUMP
    ended = driver.last(journal.Ended)
    assert (ended.outcome, ended.reason.split("; ")[-1]) == (
        "failed",
        "final checkpoint: step 6 is at there",
    )
    assert [(e.node, e.step, e.path) for e in driver.recorded(journal.FinalCheckpoint)] == [
        (1, 6, ""),
        (1, 6, "there"),
    ]
    assert "final-checkpoint" not in driver.timers


def test_a_node_that_cannot_write() -> None:
    """If a node cannot write, the next node is asked. If none can, the reason states the error."""
    driver = trained(node0=5, node1=6)
    broken(driver)
    answer(driver, 1, 6, error="disk full")
    assert asked(driver) == {0: 5}
    answer(driver, 0, 5, error="disk full")
    assert driver.outcome is False
    assert [e.error for e in driver.recorded(journal.FinalCheckpoint) if e.error] == [
        "disk full"
    ] * 2
    assert driver.last(journal.Ended).reason.endswith(
        "final checkpoint: none, because node 0 failed to write it: disk full"
    )


def test_a_node_that_is_lost_or_silent() -> None:
    """The job does not wait for a lost node, nor for a silent node beyond the limit."""
    driver = trained(node0=5, node1=6)
    broken(driver)
    driver.lose(1)
    assert asked(driver) == {0: 5}
    assert driver.outcome is None
    driver.fire("final-checkpoint")
    assert driver.outcome is False
    assert "did not write its shards within 600 s" in driver.last(journal.Ended).reason


def test_all_that_had_one_are_gone() -> None:
    """If the only node with a snapshot is lost, the reason reports no final checkpoint."""
    driver = trained(node0=5)
    driver.raises(1)
    driver.lose(0)
    assert driver.outcome is False
    assert "final checkpoint: none" in driver.last(journal.Ended).reason


def test_another_checkpoint_is_no_last_word() -> None:
    """An older checkpoint is recorded, and the job still waits for the final checkpoint."""
    driver = trained(node0=5)
    broken(driver)
    driver.say(0, p.CheckpointWritten(step=4, generation=1, path="there"))
    assert driver.phase is Phase.FINAL_CHECKPOINT
    driver.say(1, p.CheckpointWritten(step=4, generation=1, path="there", final=True))
    assert driver.phase is Phase.FINAL_CHECKPOINT
    answer(driver, 0, 5)
    assert driver.outcome is False


def test_a_checkpoint_is_as_new() -> None:
    """If a checkpoint is as new as the snapshots, the job writes no final checkpoint."""
    driver = trained(node0=5, node1=5)
    driver.say(0, p.CheckpointWritten(step=5, generation=1, path="there"))
    broken(driver)
    assert driver.recorded(journal.Decided)[-1].strategy is Strategy.FAIL
    assert driver.outcome is False


def test_no_snapshot() -> None:
    """Without a snapshot, the job writes no final checkpoint."""
    driver = trained()
    broken(driver)
    assert driver.outcome is False


def test_not_allowed() -> None:
    """Without `dump` in the policy, the job writes no final checkpoint."""
    driver = trained(policy=Policy(strategies=INNER), node0=5)
    broken(driver)
    assert driver.last(journal.Decided).strategy is Strategy.FAIL
    assert driver.outcome is False


def test_stopped() -> None:
    """A stopped job also writes a final checkpoint."""
    driver = trained(node0=5)
    driver.stop()
    driver.killed()
    assert asked(driver) == {0: 5}
    answer(driver, 0, 5)
    assert driver.last(journal.Ended).outcome == "stopped"


def test_stopped_twice() -> None:
    """A second stop does not wait for the final checkpoint."""
    driver = trained(node0=5)
    driver.stop()
    driver.stop(at_once=True)
    driver.killed()
    assert driver.outcome is False
    driver = trained(node0=5)
    driver.stop()
    driver.killed()
    assert driver.phase is Phase.FINAL_CHECKPOINT
    driver.stop(at_once=True)
    assert driver.outcome is False
    assert {bye.message.at_once for bye in driver.sent(p.EndAgent)} == {True}
    assert "before its nodes wrote it" in driver.last(journal.Ended).reason


def test_nobody_is_asked_for_while_it_is_written() -> None:
    """While the job writes its final checkpoint, time limits of the start request no node."""
    driver = Driver(nodes=2, processes=1)
    driver.hello(spare=True)
    driver.train()
    driver.say(0, p.Snapshots(kept={0: ((1, 1),)}))
    driver.lose(1)
    driver.stop()
    driver.killed()
    assert driver.phase is Phase.FINAL_CHECKPOINT
    wanted = len(driver.recorded(journal.NodeWanted))
    driver.fire("late")
    assert len(driver.recorded(journal.NodeWanted)) == wanted
    assert not driver.sent(p.Promote)


def test_succeeded() -> None:
    """A job that succeeded writes no final checkpoint."""
    driver = trained(node0=5)
    for rank in driver.ranks:
        driver.exits(rank, code=0)
    assert driver.outcome is True
    assert not driver.sent_by_node(p.WriteFinalCheckpoint)


def test_agents_that_come_while_it_is_written() -> None:
    """While the job writes its final checkpoint, it refuses new agents."""
    driver = trained(node0=5)
    broken(driver)
    driver.hello(spare=True)
    (refused,) = driver.refusals()
    assert refused == "the job is ending"
