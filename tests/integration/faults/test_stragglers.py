"""Nodes that become slow during the training: real ranks, and a simulated slow device.

One job has both kinds of slowness. Rank 1 has more work than others, from the first row to the end.
Then the device of a host becomes slow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from checked.trouble import slow
from training_jobs import RANKS
from training_jobs.baselines import Baselines
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.plans import Attempt, Plan, Row

from rekindle import names
from rekindle.profiling.findings import Slow
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.stragglers import Examined, Slowed
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.evidence import NodeCheckLimits
from rekindle.recovery.node_check.verdicts import Health
from rekindle.recovery.policy.policy import Policy, Stragglers, Strategy
from rekindle.reporting.summary import precision

HELD = 1
STEPS = 160
# The ranks' flush interval. Agents read every second, and skip the records from before their first
# read. With a much shorter interval they would lose the steps that define the usual time.
FLUSH_S = 3.0
# Compared with these times, a wait of some milliseconds for a core is short.
PRODUCT_S, LONGER_S = 0.04, 0.16
LIMITS = NodeCheckLimits(compute_factor=5.0, link_factor=5.0)  # other processes use the two cores
BUSY_NODE, SLOW_NODE = 1, 2  # each has one rank, and the host of its number
SLOW_HOST = "local-2"


def profile(job: Job, number: int) -> None:
    """Switch profiling on while all ranks pause."""
    job.wait_pause(HELD, number)
    job.profile("communication")
    job.release_all(number)


def give_more_to_do(job: Job, number: int) -> None:
    """Give rank 1 more work, until its node is checked."""
    job.wait_step(MORE_TO_DO.step, rank=0)
    Path(os.environ["MORE_FILE"]).touch()
    job.wait_event(Examined, node=BUSY_NODE, suspect=True)


def first_check(events: Sequence[journal.AnyEvent]) -> list[journal.AnyEvent]:
    """Return the events before training continues after the check of the busy node."""
    check = next(
        n
        for n, e in enumerate(events)
        if isinstance(e, Examined) and e.suspect and e.node == BUSY_NODE
    )
    end = next(n for n, e in enumerate(events) if n > check and isinstance(e, journal.Formed))
    return [*events[:end]]


def stays(ended: Ended, incident: journal.Incident | None) -> None:
    """Check that the node is found healthy and stays to the end.

    On a machine with other work, other nodes can be examined as well.
    """
    before = first_check(ended.events)
    checks = [each for each in before if isinstance(each, Examined)]
    suspects = [each.node for each in checks if each.suspect]
    assert BUSY_NODE in suspects
    assert {each.verdict.health for each in checks} == {Health.HEALTHY}
    found = precision(before)
    assert found.right == 0
    assert found.wrong
    assert {each.host for each in ended.job.events_of(journal.Isolated)} <= {SLOW_HOST}
    assert len(ended.job.record.lives(BUSY_NODE)) == 1


def make_slow(job: Job, number: int) -> None:
    """Make the device of a host slow, until the host is isolated."""
    Path(os.environ["SLOW_FILE"]).touch()
    # On a machine with other work, other hosts can really be slow for a while.
    job.wait_event(Slowed, hosts=(SLOW_HOST,))
    job.wait_event(journal.Isolated, host=SLOW_HOST)


def is_replaced(ended: Ended, incident: journal.Incident | None) -> None:
    """Check that a spare replaces the node, whose check finds it slow and all others healthy."""
    job = ended.job
    assert job.events_of(journal.NodeJoined, host=SLOW_HOST)[0].node == SLOW_NODE
    findings = [each.finding for each in job.events_of(Slowed, hosts=(SLOW_HOST,))]
    assert (Slow.RANK, (SLOW_NODE,)) in [(each.kind, each.ranks) for each in findings]
    verdicts = {each.host: each.verdict.health for each in job.events_of(Examined)}
    assert verdicts.pop(SLOW_HOST) is Health.STRAGGLER
    assert set(verdicts.values()) == {Health.HEALTHY}
    assert ended.incidents == [incident]
    assert ended.incidents[0].cause.kind is FaultKind.STRAGGLER
    assert precision(ended.events).right == 1
    lives = [len(job.record.lives(rank)) for rank in range(RANKS)]
    assert lives == [1 + (rank == SLOW_NODE) for rank in range(RANKS)]


def begun(step: int) -> tuple[Fault]:
    """Mark the start of a row: rank 0 is in this step."""
    return (Fault(0, "forward", step, life=0, do="nothing"),)


PROFILED = Row("profiling", HELD, tuple(pause_all(HELD)), profile, strategies=())
MORE_TO_DO = Row("more to do", 40, begun(40), give_more_to_do, strategies=(), check=stays)
SLOW_DEVICE = Row(
    "slow device",
    60,
    begun(60),
    make_slow,
    strategies=(Strategy.RECOVER,),
    replaced={SLOW_NODE},
    check=is_replaced,
)
PLAN = Plan(
    "stragglers",
    (Attempt((PROFILED, MORE_TO_DO, SLOW_DEVICE), {"node_check": LIMITS}),),
    steps=STEPS,
    settings={
        "nodes": RANKS,
        "spares": 1,
        "hosts": True,
        "replaces": False,
        "snapshot_every": 50,
        "policy": Policy(stragglers=Stragglers.REPLACE, hang_timeout_s=60.0),
    },
)


@pytest.fixture(scope="module")
def ended(ended_of: EndedOf, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Run the job; its ranks write profiling records."""
    folder = tmp_path_factory.mktemp("slowing")
    environment = slow(SLOW_HOST, seconds=LONGER_S, begins=folder / "slow-now") | {
        names.ENV_HOME: str(folder / "home"),
        names.ENV_PROFILING_FLUSH_S: str(FLUSH_S),
        "PRODUCT_S": str(PRODUCT_S),
        "MORE_RANK": str(BUSY_NODE),
        "MORE_S": str(LONGER_S),
        "MORE_FILE": str(folder / "more-now"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return ended_of(PLAN)


def test_a_node_that_has_more_to_do_stays(ended: Ended) -> None:
    """The check of a node whose rank has more work finds it healthy, and the node stays."""
    ended.check(MORE_TO_DO)


def test_a_slow_node_is_replaced_between_two_steps(ended: Ended) -> None:
    """A spare replaces the slow node; no other node is replaced, and no step is lost."""
    ended.check(SLOW_DEVICE)


def test_end(ended: Ended, baseline_of: Baselines) -> None:
    """The job's training equals that of an undisturbed job."""
    ended.check_end(baseline_of("ddp", RANKS, STEPS))
