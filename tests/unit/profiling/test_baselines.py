"""The baseline of a rank, and changes of the baseline."""

from __future__ import annotations

import random

import pytest
from paces.watched import Work, watch

from rekindle.profiling.detector import UNRECORDED, Detector
from rekindle.profiling.findings import Finding, Slow
from rekindle.profiling.series import Noise, sample_of, usual_noise
from rekindle.profiling.steps import StepTimes

Named = list[tuple[Slow, tuple[int, ...]]]


def named(found: list[Finding]) -> Named:
    return [(each.kind, each.ranks) for each in found]


def slow_in(factor: float, *phases: range, rank: int = 3) -> Work:
    """Return the work of a rank that is slow in some phases of a run."""
    return lambda r, step: factor if r == rank and any(step in p for p in phases) else 1.0


@pytest.mark.parametrize("first", [25, 40])
def test_a_rank_that_was_slow_at_first_and_becomes_so_again(first: int) -> None:
    """If a slow start ends, the baseline falls, so the detector finds the second slow phase."""
    found, detector = watch(8, slow_in(1.5, range(first), range(200, 300)), steps=240)
    assert named(found) == [(Slow.UNEVEN, (3,)), (Slow.RANK, (3,))]
    assert (found[0].since, abs(found[1].since - 200) <= 2) == (0, True)
    assert found[1].found < 220
    assert found[1].factor == pytest.approx(1.5, rel=0.05)
    assert named(detector.findings) == [(Slow.RANK, (3,))]


def test_uneven_work_is_over_when_the_relation_is() -> None:
    found, detector = watch(8, slow_in(1.5, range(60)), steps=100)
    assert named(found) == [(Slow.UNEVEN, (3,))]
    assert detector.findings == []


@pytest.mark.parametrize("onset", [12, 14])
def test_a_rank_that_becomes_slow_while_its_baseline_is_taken(onset: int) -> None:
    """The first half of the baseline shows the usual time of a rank that then becomes slow."""
    found, _ = watch(8, slow_in(1.5, range(onset, 100)), steps=60)
    assert named(found) == [(Slow.RANK, (3,))]
    assert abs(found[0].since - onset) <= 2


def test_a_rank_that_becomes_slower_and_slower_from_the_first_step_on() -> None:
    found, _ = watch(8, lambda rank, step: 1 + step / 50 if rank == 3 else 1.0, steps=50)
    assert (Slow.RANK, (3,)) in named(found)


def test_an_event_that_has_passed_hides_nobody() -> None:
    """After six of eight ranks were slow for 12 steps, the detector still finds a slow rank."""

    def work(rank: int, step: int) -> float:
        once = 2.0 if rank >= 2 and 60 <= step < 72 else 1.0
        return once * (1.4 if rank == 3 and step >= 200 else 1.0)

    found, _ = watch(8, work, steps=240)
    assert named(found) == [(Slow.RANK, (3,))]
    assert 200 < found[0].found < 220


def test_peers_that_are_faster_for_good_hide_nobody() -> None:
    """After all ranks become faster for good, the detector still finds a rank that becomes slow."""

    def work(rank: int, step: int) -> float:
        return (0.6 if step >= 60 else 1.0) * (1.4 if rank == 3 and step >= 160 else 1.0)

    found, _ = watch(8, work, steps=200)
    assert named(found) == [(Slow.RANK, (3,))]


def test_whoever_keeps_its_pace_while_all_peers_become_faster_is_uneven() -> None:
    """If all peers become faster, the remaining rank has uneven work from that step.

    Its work is the same as before, and the others have less.
    """
    found, _ = watch(8, lambda rank, step: 0.6 if rank and step >= 60 else 1.0, steps=140)
    assert named(found) == [(Slow.UNEVEN, (0,))]
    assert abs(found[0].since - 60) <= 20


def test_batches_that_are_longer_for_good_hide_no_slow_link() -> None:
    def transfer(group: str, step: int) -> float:
        return (0.2 if step < 60 else 0.4) * (2.0 if step >= 160 else 1.0)

    found, _ = watch(
        4,
        lambda rank, step: 2.0 if step >= 60 else 1.0,
        transfer=transfer,
        groups={"dp": [0, 1, 2, 3]},
        steps=200,
    )
    assert named(found) == [(Slow.LINK, (0, 1, 2, 3))]


def test_a_loader_that_was_slow_at_first_may_become_so_again() -> None:
    """A cold cache at the start does not hide slow loading later."""

    def loading(rank: int, step: int) -> float:
        return 0.5 if rank == 1 and (step < 30 or step >= 150) else 0.01

    found, _ = watch(4, loading=loading, steps=180)
    assert named(found) == [(Slow.LOADING, (1,))]


# ---- steps that correlate


def lasting(memory: float, spread: float, seed: int) -> Work:
    """Return work whose deviation correlates with the deviation of the previous step."""
    chance, off = random.Random(seed), dict[int, float]()

    def work(rank: int, step: int) -> float:
        new = chance.gauss(0, spread)
        off[rank] = memory * off.get(rank, new) + (1 - memory**2) ** 0.5 * new
        return 1.0 + off[rank]

    return work


def test_work_that_varies_slowly_blames_hardly_anybody() -> None:
    """For 16 healthy ranks, in six runs, the detector reports at most one slow rank.

    A detector that ignores the correlation reports seven.
    """
    found = []
    for seed in range(6):
        found += watch(16, lasting(0.9, 0.03, seed), steps=200, seed=seed)[0]
    assert len([each for each in found if each.may_be_sick]) <= 1


def test_a_rank_that_becomes_slow_is_found_where_work_varies_slowly() -> None:
    """The detector finds a rank whose slowdown exceeds the slow variation of its work."""
    usual, slow = lasting(0.9, 0.03, 1), slow_in(1.6, range(100, 200))
    found, _ = watch(16, lambda rank, step: usual(rank, step) * slow(rank, step), steps=140)
    assert named(found) == [(Slow.RANK, (3,))]


def test_how_much_steps_take_after_each_other_is_measured() -> None:
    """usual_noise() measures the correlation of steps, also of short and uncorrelated series."""
    for memory in (0.0, 0.5, 0.9):
        series = []
        for seed in range(40):
            work = lasting(memory, 0.03, seed)
            series.append(sample_of([work(0, step) for step in range(40)]))
        found = usual_noise(series)
        assert found.share == pytest.approx(memory, abs=0.1)
        assert found.spread == pytest.approx(0.03, rel=0.35)


def test_no_noise_at_all() -> None:
    assert sample_of([]).count == 0
    assert sample_of([1.0] * 20).near == 0.0
    assert usual_noise([]) == Noise()


@pytest.mark.parametrize("noise", [Noise(), Noise(0.9, 0.9), Noise(0.5, 0.9), Noise(0.3, 0.3)])
@pytest.mark.parametrize("count", [1, 2, 8, 20])
def test_how_far_a_mean_is_off(noise: Noise, count: int) -> None:
    """swing() agrees with the explicit sum over all lags."""
    shared = [noise.share * noise.memory ** (lag - 1) for lag in range(1, count)]
    by_hand = 1 + 2 * sum((1 - (lag + 1) / count) * each for lag, each in enumerate(shared))
    assert noise.swing(count) == pytest.approx(by_hand / count)


# ---- collectives that are not in every step


@pytest.mark.parametrize("every", [4, 15])
def test_collectives_in_some_steps_only(every: int) -> None:
    """With collectives in every fourth step, the detector still finds a slow rank.

    The other ranks' records are valid, and no baseline starts again.
    """
    found, _ = some_recorded(lambda step: step % every == 0, slow_from=100, steps=160)
    assert named(found) == [(Slow.RANK, (3,))]
    assert found[0].found < 120


def test_records_of_collectives_that_end() -> None:
    """After the records of collectives end, the detector reports no slow rank and no slow node."""

    def work(rank: int, step: int) -> float:
        return 0.5 if rank < 2 else 1.0

    found, detector = watch(8, work, recorded=lambda step: step < 60, steps=60 + 3 * UNRECORDED)
    assert {each.kind for each in found} == {Slow.UNEVEN}
    assert detector.findings == []


def some_recorded(recorded: object, *, slow_from: int, steps: int) -> tuple[list, Detector]:
    """Return the findings and the detector after these steps of eight ranks.

    In a step without a collective, a rank does not wait for others.
    """
    chance, detector, found = random.Random(1), Detector(), []
    for step in range(steps):
        work = {
            r: 0.1 * chance.lognormvariate(0, 0.01) * (2 if r == 3 and step >= slow_from else 1)
            for r in range(8)
        }
        most = max(work.values())
        times = {
            r: StepTimes(step, 0, most, own, waiting=most - own + 0.01)
            if recorded(step)  # type: ignore[operator]
            else StepTimes(step, 0, own, own)
            for r, own in work.items()
        }
        found += detector.add(step, times)
    return found, detector


# ---- groups that do the same work, and replaced ranks


STAGES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def more_in_the_last_stage(rank: int, step: int) -> float:
    return 1.3 if rank >= 12 and step >= 100 else 1.0


def test_a_group_that_has_more_to_do_from_some_step_on_is_uneven() -> None:
    found, detector = watch(
        16, more_in_the_last_stage, detector=Detector(STAGES, per_node=4), steps=200
    )
    assert named(found) == [(Slow.UNEVEN, (12, 13, 14, 15))]
    assert abs(found[0].since - 100) <= 2
    assert named(detector.findings) == named(found)


def test_without_groups_that_is_a_slow_node() -> None:
    """Without known groups, the detector reports a slow node instead of uneven work.

    Therefore Rekindle checks a node before it replaces it.
    """
    found, _ = watch(16, more_in_the_last_stage, detector=Detector(per_node=4), steps=130)
    assert named(found) == [(Slow.NODE, (12, 13, 14, 15))]


def test_a_group_that_has_had_more_to_do_is_uneven_as_long_as_it_has() -> None:
    found, detector = watch(
        16,
        lambda rank, step: 1.3 if rank >= 12 and step < 100 else 1.0,
        detector=Detector(STAGES, per_node=4),
        steps=150,
    )
    assert named(found) == [(Slow.UNEVEN, (12, 13, 14, 15))]
    assert found[0].since == 0
    assert detector.findings == []


def test_a_slow_rank_within_a_group() -> None:
    found, _ = watch(16, slow_in(1.3, range(60, 100), rank=13), detector=Detector(STAGES), steps=90)
    assert named(found) == [(Slow.RANK, (13,))]


def test_ranks_that_are_other_ones_are_forgotten_and_the_rest_is_kept() -> None:
    """forget() clears only the baselines of replaced ranks, and keeps other findings."""
    found, detector = watch(8, slow_in(1.5, range(60, 300)), steps=90)
    assert named(found) == [(Slow.RANK, (3,))]
    detector.forget([6, 7])
    assert named(detector.findings) == [(Slow.RANK, (3,))]
    more, _ = watch(8, slow_in(1.5, range(300)), detector=detector, steps=60, seed=6)
    assert more == []
    assert named(detector.findings) == [(Slow.RANK, (3,))]
    detector.forget([3])
    assert detector.findings == []
    more, _ = watch(8, slow_in(1.5, range(300)), detector=detector, steps=60, seed=7)
    assert named(more) == [(Slow.UNEVEN, (3,))]
