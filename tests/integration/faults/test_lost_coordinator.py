"""The coordinator is killed: training continues without it, and another one takes its place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest
from training_jobs.baselines import Baselines
from training_jobs.checks import assert_same_training
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.record import Record
from training_jobs.sequence import Attempt, EndedOf, Plan, Row, each_row

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Policy, Strategy

RANKS = 4


def stand(step: int) -> tuple[Fault, ...]:
    """Have all ranks wait in a step."""
    return tuple(dataclasses.replace(pause, life=0) for pause in pause_all(step))


def replace(run: Job) -> None:
    """Kill the coordinator, and start another one."""
    run.kill_coordinator()
    run.revive_coordinator()


def while_they_train(run: Job, first: int) -> None:
    """All ranks do further steps without a coordinator."""
    run.wait_pause(4, first)
    run.kill_coordinator()
    run.release_all(first)
    for number in range(first + RANKS, first + 2 * RANKS):
        run.wait_fault(number)
    run.revive_coordinator()


def as_a_rank_dies(run: Job, first: int) -> None:
    """Rank 3 dies while there is no coordinator that could be informed."""
    run.wait_pause(11, first)
    pid = run.pid(3)
    run.kill_coordinator()
    os.kill(pid, 9)
    run.revive_coordinator()
    run.release_all(first)


def as_it_recovers(run: Job, first: int) -> None:
    """An incident is open when the coordinator dies."""
    run.wait_pause(14, first)
    seen = len(run.events_of(journal.FaultSeen))
    run.kill(1)
    run.wait_event(journal.FaultSeen, count=seen + 1)
    replace(run)
    run.release_all(first)


def while_they_stand(run: Job, first: int) -> None:
    """The ranks stand in a step until the next coordinator has decided."""
    run.wait_pause(17, first)
    decided = len(run.events_of(journal.Decided))
    replace(run)
    run.wait_event(journal.Decided, count=decided + 1)
    run.release_all(first)


LOST = {"strategies": (Strategy.RETRY,), "cause": (Kind.COORDINATOR, -1)}
# Of the ranks that train on, each stands in step 8 until its generation is over.
PLAN = Plan(
    "coordinator",
    (
        Attempt(
            (
                Row(
                    "killed while the ranks train",
                    4,
                    (*stand(4), *(Fault(rank, "forward", 8, do="over") for rank in range(RANKS))),
                    while_they_train,
                    **LOST,
                ),
                Row(
                    "killed before a rank dies",
                    11,
                    stand(11),
                    as_a_rank_dies,
                    strategies=None,
                    replaced={3},
                    cause=(Kind.PROCESS, 3),
                ),
                Row(
                    "killed while it recovers",
                    14,
                    stand(14),
                    as_it_recovers,
                    strategies=None,
                    replaced={1},
                ),
                Row("killed while the ranks stand", 17, stand(17), while_they_stand, **LOST),
            )
        ),
    ),
    settings={"nodes": 2},
)


@pytest.mark.parametrize(("plan", "row"), each_row(PLAN))
def test_no_step_is_lost(ended_of: EndedOf, plan: Plan, row: Row) -> None:
    """The next coordinator hears of all that happened meanwhile, and closes what was open."""
    ended_of(plan).check(row)


def test_the_training_is_that_of_an_undisturbed_run(ended_of: EndedOf, baseline: Record) -> None:
    ended_of(PLAN).check_end(baseline)


def test_none_comes_while_the_ranks_stand(job: Callable[..., Job], baseline_of: Baselines) -> None:
    """Agents and ranks end in time, and the job can be resumed from its newest checkpoint."""
    pause = Fault(0, "forward", 9, do="pause")
    policy = Policy(coordinator_timeout_s=0.5)
    run = job(pause, processes=2, snapshot_every=0, checkpoint_every=4, policy=policy)
    run.wait_fault(0)
    run.wait_event(journal.Checkpointed, step=8)
    run.kill_coordinator()
    run.wait(lambda: not run.leftovers(), "the end of all processes")
    run.plan()
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    assert run.events_of(journal.Formed)[-1].step == 8
    assert_same_training(run.record, baseline_of("ddp", 2))


def test_none_comes_while_the_ranks_train(job: Callable[..., Job]) -> None:
    """Without a coordinator for longer than the policy allows, nothing of the job is left."""
    run = job(processes=2, steps=100_000, policy=Policy(coordinator_timeout_s=1.0))
    run.wait_step(0, 4)
    run.kill_coordinator()
    run.wait(lambda: not run.leftovers(), "the end of all processes")
