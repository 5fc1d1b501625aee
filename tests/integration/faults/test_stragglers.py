"""Nodes that become slow while they train: real ranks, whose host's device gets slow.

One job meets both kinds of slowness. Rank 1 has more to do than others, from the first row to the
end. Then the device of a host becomes slow.
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
from rekindle.recovery.faults.straggler_precision import precision
from rekindle.recovery.faults.stragglers import Examined, Slowed
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.evidence import NodeCheckLimits
from rekindle.recovery.node_check.verdicts import Health
from rekindle.recovery.policy.policy import Policy, Stragglers, Strategy

HELD = 1
STEPS = 160
# Ranks write so often. Agents look every second, and do not read what was written before the first
# look: a much shorter time than this would cost the steps that tell what is usual.
FLUSH_S = 3.0
# A rank that waits some milliseconds for a core is not slow beside these.
PRODUCT_S, LONGER_S = 0.04, 0.16
LIMITS = NodeCheckLimits(compute_factor=5.0, link_factor=5.0)  # two cores are never quiet
BUSY_NODE, SLOW_NODE = 1, 2  # each has one rank, and the host of its number
SLOW_HOST = "local-2"


def profile(job: Job, number: int) -> None:
    """Switch profiling on while all ranks pause."""
    job.wait_pause(HELD, number)
    job.profile("communication")
    job.release_all(number)


def give_more_to_do(job: Job, number: int) -> None:
    """Give rank 1 more to do, until its node is checked."""
    job.wait_step(MORE_TO_DO.step, rank=0)
    Path(os.environ["MORE_FILE"]).touch()
    job.wait_event(Examined, node=BUSY_NODE, suspect=True)


def first_check(events: Sequence[journal.AnyEvent]) -> list[journal.AnyEvent]:
    """Return the events before training continues after the check of the busy node."""
    suspect = next(n for n, e in enumerate(events) if isinstance(e, Examined) and e.suspect)
    end = next(n for n, e in enumerate(events) if n > suspect and isinstance(e, journal.Formed))
    return [*events[:end]]


def stays(ended: Ended, incident: journal.Incident | None) -> None:
    """The node is found healthy, and keeps its place to the end.

    On a machine that does other work as well, other nodes can be suspects too.
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
    # On a machine that does something else as well others may be slow for a while, for real.
    job.wait_event(Slowed, hosts=(SLOW_HOST,))
    job.wait_event(journal.Isolated, host=SLOW_HOST)


def is_replaced(ended: Ended, incident: journal.Incident | None) -> None:
    """A spare takes the node's place; its check finds it slow, and all others healthy."""
    job = ended.job
    assert job.events_of(journal.NodeJoined, host=SLOW_HOST)[0].node == SLOW_NODE
    said = [each.finding for each in job.events_of(Slowed, hosts=(SLOW_HOST,))]
    assert (Slow.RANK, (SLOW_NODE,)) in [(each.kind, each.ranks) for each in said]
    verdicts = {each.host: each.verdict.health for each in job.events_of(Examined)}
    assert verdicts.pop(SLOW_HOST) is Health.STRAGGLER
    assert set(verdicts.values()) == {Health.HEALTHY}
    assert ended.incidents == [incident]
    assert ended.incidents[0].cause.kind is FaultKind.STRAGGLER
    assert precision(ended.events).right == 1
    lives = [len(job.record.lives(rank)) for rank in range(RANKS)]
    assert lives == [1 + (rank == SLOW_NODE) for rank in range(RANKS)]


def begun(step: int) -> tuple[Fault]:
    """Mark the beginning of a row: rank 0 is in this step."""
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
    """The job; its ranks write down what they do."""
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
    """Its check finds it healthy: what is slow is its rank's work, not its device."""
    ended.check(MORE_TO_DO)


def test_a_slow_node_is_replaced_between_two_steps(ended: Ended) -> None:
    """A spare takes its place; nobody else is replaced, and no step is lost."""
    ended.check(SLOW_DEVICE)


def test_end(ended: Ended, baseline_of: Baselines) -> None:
    """The job has trained what an undisturbed one trains."""
    ended.check_end(baseline_of("ddp", RANKS, STEPS))
