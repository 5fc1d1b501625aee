"""The state that a rank shares with no other rank is its own after each fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from training_jobs import own_state
from training_jobs.injection import Fault
from training_jobs.job import Job

from rekindle.names import SPARE
from rekindle.protocol.http_views import Drain
from rekindle.recovery.journal import journal

EVERY = 4
SETTINGS: dict[str, Any] = {
    "script": Path(own_state.__file__),
    "processes": 2,
    "steps": 24,
    "snapshot_every": EVERY,
}
KILLS = (
    Fault(1, "forward", 3, life=0),
    Fault(0, "backward", 6, life=0),
    Fault(1, "update", 9, life=0),
    Fault(0, "update", 13, life=0),
    Fault(1, "forward", 16, life=0, do="hiccup"),
    Fault(0, "last line", 19, life=0),
)


def values(run: Job, ranks: int = 2) -> dict[str, Any]:
    """Return the losses and buffers of each step of each rank, and the state at the end."""
    found: dict[str, Any] = {}
    for rank in range(ranks):
        for step, metrics in run.record.steps(rank).items():
            found[f"rank {rank} step {step}"] = metrics["loss"], metrics["buffers"]
        found[f"rank {rank}"] = run.record.result(rank)
    return found


def trained(run: Job, ranks: int = 2) -> dict[str, Any]:
    """Return the values of a job that has succeeded."""
    ended = run.end()
    assert ended.outcome == "succeeded", f"{ended}{run.story()}"
    return values(run, ranks)


def test_kills_change_no_rank(job: Callable[..., Job]) -> None:
    """After kills of each rank all losses, buffers, generators and environments are the same.

    After a kill in the update, a rank has no copy of its part of the newest state.
    """
    whole = trained(job(**SETTINGS))
    assert whole["rank 0"]["observer"] != whole["rank 1"]["observer"]
    run = job(*KILLS, **SETTINGS)
    assert trained(run) == whole
    assert len(run.incidents()) == len(KILLS), run.story()
    returned = [each.step for each in run.events_of(journal.Formed) if "snapshot" in each.sources]
    assert returned, run.story()
    assert all(step % EVERY == 0 for step in returned), run.story()


def test_a_lost_node_returns_all_ranks_to_the_newest_snapshot(job: Callable[..., Job]) -> None:
    """The other node's snapshot has the state of each rank of the lost one."""
    settings = {**SETTINGS, "nodes": 2, "processes": 4}
    whole = trained(job(**settings), ranks=4)
    run = job(Fault(0, "forward", 10, do="pause"), **settings)
    run.wait_fault(0)
    run.kill_node(1)
    run.release(0)
    assert trained(run, ranks=4) == whole
    formed = run.events_of(journal.Formed)[-1]
    assert formed.step in (4, 8), run.story()


def test_a_node_moves_with_the_state_of_its_ranks(job: Callable[..., Job]) -> None:
    """The spare fetches what the ranks of the node share with no other, and no step is lost."""
    settings = {**SETTINGS, "nodes": 2, "processes": 4}
    whole = trained(job(**settings), ranks=4)
    run = job(Fault(0, "forward", 10, do="pause"), Fault(0, "forward", 15, do="pause"), **settings)
    run.bring(SPARE)
    for number, node in enumerate((1, 0)):
        run.wait_fault(number)
        run.client().drain(Drain(node=node, by="test"))
        run.wait(lambda: any(each.ready for each in run.status().moves), f"node {node} can move")
        run.release(number)
    assert trained(run, ranks=4) == whole
    assert len(run.events_of(journal.Moved)) == 2, run.story()
    assert [each.steps_lost for each in run.incidents()] == [0, 0], run.story()
    assert not [each for each in run.events_of(journal.Formed) if "snapshot" in each.sources]


def test_a_checkpoint_has_the_state_of_each_rank(job: Callable[..., Job]) -> None:
    """A job that is resumed equals an undisturbed one; another world size is refused."""
    whole = trained(job(**SETTINGS))
    run = job(Fault(1, "forward", 13, do="raise"), **SETTINGS)
    assert run.end().outcome == "failed"
    run.plan()
    run.start(processes_per_node=3)
    ended = run.end()
    assert ended.outcome == "failed"
    assert "environment of 2 ranks, but this job has 3" in ended.reason
    run.start(processes_per_node=2)
    assert trained(run) == whole
