"""The end of the coordinator: training continues without it, and another one replaces it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from broken import Bug
from training_jobs.baselines import Baselines
from training_jobs.checks import assert_same_training
from training_jobs.ended import EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.record import Record
from training_jobs.rows import paused

from rekindle.coordinator.machine.checkpoints import Checkpoints
from rekindle.errors import UnexpectedError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy

RANKS = 4


def replace(run: Job) -> None:
    """Kill the coordinator, and start another one."""
    run.kill_coordinator()
    run.revive_coordinator()


def while_they_train(run: Job, first: int) -> None:
    """Let all ranks do further steps without a coordinator."""
    run.wait_pause(4, first)
    run.kill_coordinator()
    run.release_all(first)
    for number in range(first + RANKS, first + 2 * RANKS):
        run.wait_fault(number)
    run.revive_coordinator()


def as_a_rank_dies(run: Job) -> None:
    """Kill rank 3 while there is no coordinator."""
    pid = run.pid(3)
    run.kill_coordinator()
    os.kill(pid, 9)
    run.revive_coordinator()


def as_it_recovers(run: Job) -> None:
    """Kill the coordinator while an incident is open."""
    count = len(run.events_of(journal.FaultSeen))
    run.kill(1)
    run.wait_event(journal.FaultSeen, count=count + 1)
    replace(run)


def while_they_stand(run: Job) -> None:
    """Replace the coordinator; the ranks wait in a step until the next one has decided."""
    decided = len(run.events_of(journal.Decided))
    replace(run)
    run.wait_event(journal.Decided, count=decided + 1)


def meets_a_bug(run: Job) -> None:
    """Let a coordinator meet a bug in a heartbeat while the ranks stand, and start the next one."""
    bug = Bug(run.folder, Checkpoints.on_beat)
    run.kill_coordinator()
    run.revive_coordinator(bug.environment)
    bug.begin()
    assert run.lose_coordinator() == UnexpectedError.exit_status
    [report] = run.directory.path.glob("coordinator-bug-*")
    assert '"kind": "message"' in report.read_text()
    decided = len(run.events_of(journal.Decided))
    run.revive_coordinator()
    run.wait_event(journal.Decided, count=decided + 1)


LOST = {"strategies": (Strategy.RETRY,), "cause": (FaultKind.COORDINATOR, -1)}
# Each rank that continues to train waits in step 8 until its generation is over.
PLAN = Plan(
    "coordinator",
    (
        Attempt(
            (
                Row(
                    "killed while the ranks train",
                    4,
                    (
                        *pause_all(4, life=0),
                        *(Fault(rank, "forward", 8, do="over") for rank in range(RANKS)),
                    ),
                    while_they_train,
                    **LOST,
                ),
                paused(
                    "killed before a rank dies",
                    11,
                    as_a_rank_dies,
                    strategies=None,
                    replaced={3},
                    cause=(FaultKind.PROCESS, 3),
                ),
                paused(
                    "killed while it recovers",
                    14,
                    as_it_recovers,
                    strategies=None,
                    replaced={1},
                ),
                paused("killed while the ranks stand", 17, while_they_stand, **LOST),
                paused("a bug ends it", 20, meets_a_bug, strategies=None),
            )
        ),
    ),
    settings={"nodes": 2},
)


@pytest.mark.parametrize(("plan", "row"), each_row(PLAN))
def test_no_step_is_lost(ended_of: EndedOf, plan: Plan, row: Row) -> None:
    """The next coordinator gets all facts from the meantime, and closes the open incidents."""
    ended_of(plan).check(row)


def test_the_training_is_that_of_an_undisturbed_run(ended_of: EndedOf, baseline: Record) -> None:
    ended_of(PLAN).check_end(baseline)


def test_none_comes_while_the_ranks_stand(job: Callable[..., Job], baseline_of: Baselines) -> None:
    """Without another coordinator, agents and waiting ranks end.

    The job then resumes from its newest checkpoint.
    """
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
    """If the coordinator is absent longer than the policy allows, all processes of the job end."""
    run = job(processes=2, steps=100_000, policy=Policy(coordinator_timeout_s=1.0))
    run.wait_step(4, rank=0)
    run.kill_coordinator()
    run.wait(lambda: not run.leftovers(), "the end of all processes")
