"""The trials of the random fault campaign, and what must result from them."""

from __future__ import annotations

import itertools

import pytest
from campaign.expectations import End, effect_of, expected
from campaign.faults import Act, Fault, Moment, Victim
from campaign.kinds import KINDS, SNAPSHOT_EVERY, Kind
from campaign.trials import PAUSES_S, Trial, trial_of

SEEDS = range(20_000)
DDP = Kind("two nodes", nodes=2, ranks=1)
ONE = Kind("one node")
SHARDS = Kind("shards", "fsdp", nodes=2, ranks=1, copies=False)
FIXED = Kind("fixed", recovers=False)


def in_training(kind: Kind, victim: Victim, act: Act) -> Trial:
    """Return a trial with one fault in training."""
    return Trial(0, kind, (Fault(victim, act, Moment.TRAINING, step=9),))


def test_a_seed_gives_one_trial() -> None:
    """The same seed always gives the same trial, and seeds give different trials."""
    first, second = ([trial_of(seed) for seed in range(200)] for _ in range(2))
    assert first == second
    assert len({(trial.kind, trial.faults) for trial in first}) == len(first)


def test_each_combination_is_reachable() -> None:
    """Trials have each kind of job with each of its processes, signals and moments."""
    found = {
        (trial.kind.name, fault.victim, fault.act, fault.moment)
        for trial in map(trial_of, SEEDS)
        for fault in trial.faults
    }
    wanted = {
        (kind.name, victim, act, moment)
        for kind in KINDS
        for victim in kind.victims()
        for act in Act
        for moment in kind.moments(victim)
    }
    assert found == wanted
    assert {victim for _, victim, _, _ in wanted} == set(Victim)
    assert {moment for *_, moment in wanted} == set(Moment)


def test_faults_of_a_trial() -> None:
    """Faults come in the order of their moments. A launcher that stays stopped is the last one."""
    order = [Moment.LAUNCH, Moment.START, None, Moment.END]
    for trial in map(trial_of, range(2000)):
        assert 1 <= len(trial.faults) <= 3
        held = [
            fault.act is Act.STOP and fault.victim in (Victim.LAUNCHER, Victim.FLOW)
            for fault in trial.faults
        ]
        assert held == sorted(held)
        free = [fault for fault, is_held in zip(trial.faults, held, strict=True) if not is_held]
        places = [order.index(f.moment) if f.moment in order else 2 for f in free]
        assert places == sorted(places)
        for fault in trial.faults:
            assert fault.paused_s in (PAUSES_S if fault.act is Act.PAUSE else (0.0,))


@pytest.mark.parametrize(
    ("kind", "victim", "act", "ends", "lost"),
    [
        (DDP, Victim.RANK, Act.KILL, set(), 0),
        (DDP, Victim.AGENT, Act.STOP, set(), 0),
        (DDP, Victim.STORE, Act.TERM, set(), 0),
        (DDP, Victim.COORDINATOR, Act.STOP, set(), 0),
        (DDP, Victim.COORDINATOR, Act.TERM, {End.STOPPED}, SNAPSHOT_EVERY),
        (DDP, Victim.LAUNCHER, Act.KILL, {End.KILLED}, SNAPSHOT_EVERY),
        (DDP, Victim.LAUNCHER, Act.TERM, {End.STOPPED}, SNAPSHOT_EVERY),
        (DDP, Victim.LAUNCHER, Act.STOP, set(), 0),
        (DDP, Victim.FLOW, Act.KILL, set(), 0),
        (ONE, Victim.AGENT, Act.KILL, set(), None),
        (SHARDS, Victim.RANK, Act.KILL, set(), SNAPSHOT_EVERY),
        (SHARDS, Victim.AGENT, Act.KILL, set(), None),
        (FIXED, Victim.RANK, Act.KILL, {End.FAILED}, SNAPSHOT_EVERY),
    ],
)
def test_expectations(kind: Kind, victim: Victim, act: Act, ends: set[End], lost: int) -> None:
    """One fault in training ends the attempt, or not, and costs the documented steps."""
    trial = in_training(kind, victim, act)
    [effect] = expected(trial).effects
    assert (effect.ends, effect.certain) == (ends, bool(ends))
    assert expected(trial).steps_lost == lost


@pytest.mark.parametrize(("moment", "act"), itertools.product(Moment, Act))
def test_a_fault_at_the_end_may_come_too_late(moment: Moment, act: Act) -> None:
    """After the last step the job may succeed before its launcher ends."""
    effect = effect_of(ONE, Fault(Victim.LAUNCHER, act, moment))
    ends = act in (Act.KILL, Act.TERM)
    assert effect.certain is (ends and moment is not Moment.END)
    assert bool(effect.ends) is ends


def test_a_trial_states_all_that_must_result() -> None:
    """The text of a trial has a line for each fault, and one for each expectation."""
    for trial in map(trial_of, range(50)):
        assert len(str(trial).splitlines()) == 1 + len(trial.faults)
        assert len(str(expected(trial)).splitlines()) == 1 + len(trial.faults)
