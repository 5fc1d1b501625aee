"""Faults at random moments, for a long time."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import (
    assert_pids_kept,
    assert_same_training,
    assert_samples_once,
    steps_lost,
)
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.record import Record

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy

STEPS = 400
KILLS = 8

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def long_baseline(baseline_of: Callable[..., Record]) -> Callable[[str], Record]:
    """Return a function that gives the uninterrupted long run of a variant."""
    return lambda variant: baseline_of(variant, steps=STEPS)


def strike(run: Job, chance: random.Random) -> int:
    """Kill one or two ranks, or a node; return the number of killed ranks."""
    kind = chance.choice(["rank", "rank", "ranks", "node"])
    if kind == "node" and run.spec.nodes > 1:
        run.kill_node(chance.randrange(run.spec.nodes))
        return RANKS // run.spec.nodes
    count = 2 if kind == "ranks" else 1
    victims = chance.sample(range(RANKS), count)
    for rank in victims:
        pid = run.status().ranks[rank].pid
        if pid:
            os.kill(pid, signal.SIGKILL)
    return count


def strike_and_end(run: Job, chance: random.Random, baseline: Record) -> None:
    """Kill at random moments; check that the training equals the baseline, bit by bit."""
    run.wait_event(journal.FirstStep)
    for kill in range(KILLS):
        step = (kill + 1) * STEPS // (KILLS + 2) + chance.randrange(STEPS // 20)
        run.wait(lambda wanted=step: run.status().finished >= wanted, f"step {step}")
        strike(run, chance)
    ended = run.end(300)
    assert ended.outcome == "succeeded", run.story()
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("variant", ["ddp", "plain"])
@pytest.mark.parametrize("seed", range(2))
def test_random_kills(
    seed: int,
    variant: str,
    nodes: int,
    job: Callable[..., Job],
    long_baseline: Callable[[str], Record],
) -> None:
    """Eight kills of ranks and nodes at random moments lose no step and no sample."""
    chance = random.Random(f"{seed} {variant} {nodes}")
    baseline = long_baseline(variant)
    run = job(variant=variant, nodes=nodes, steps=STEPS)
    strike_and_end(run, chance, baseline)
    assert sum(steps_lost(run)) == 0
    assert run.leftovers() == []


@pytest.mark.parametrize("variant", ["fsdp", "hsdp", "sharded", "hybrid", "zero"])
@pytest.mark.parametrize("seed", range(2))
def test_random_kills_of_shards(
    seed: int,
    variant: str,
    job: Callable[..., Job],
    long_baseline: Callable[[str], Record],
) -> None:
    """After kills of ranks with shards at random moments the training is the same, bit by bit."""
    chance = random.Random(f"{seed} {variant}")
    baseline = long_baseline(variant)
    run = job(variant=variant, steps=STEPS, snapshot_every=10)
    strike_and_end(run, chance, baseline)
    assert run.leftovers() == []


@pytest.mark.parametrize("seed", range(6))
def test_second_kill_at_a_random_moment(
    seed: int, job: Callable[..., Job], long_baseline: Callable[[str], Record]
) -> None:
    """A second kill at a random moment after the first loses no step."""
    chance = random.Random(seed)
    run = job(nodes=2, steps=STEPS)
    for kill in range(5):
        step = (kill + 1) * STEPS // 8
        run.wait(lambda wanted=step: run.status().finished >= wanted, f"step {step}")
        first, second = chance.sample(range(RANKS), 2)
        moment = chance.choice([journal.FaultSeen, journal.RanksStarted, journal.Formed])
        count = len(run.events_of(moment))
        run.kill(first)
        run.wait(lambda of=moment, n=count: len(run.events_of(of)) > n, moment.__name__)
        run.kill(second)
    ended = run.end(300)
    assert ended.outcome == "succeeded", run.story()
    assert_same_training(run.record, long_baseline("ddp"))
    assert_samples_once(run.record)
    assert sum(steps_lost(run)) == 0


def test_many_broken_links(job: Callable[..., Job], long_baseline: Callable[[str], Record]) -> None:
    """After a hundred broken links all ranks have their processes, and no step is lost."""
    steps = range(5, STEPS, 4)
    faults = [Fault(step // 4 % RANKS, "forward", step, do="link") for step in steps]
    run = job(*faults, variant="plain", steps=STEPS, policy=Policy(max_recoveries=1000))
    assert run.end(500).outcome == "succeeded", run.story()
    assert_same_training(run.record, long_baseline("plain"))
    assert_pids_kept(run.record)
    assert sum(steps_lost(run)) == 0
