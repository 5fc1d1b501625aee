"""Findings of the detector for simulated steps with noise of known size."""

from __future__ import annotations

import random
import re

import pytest
from paces.watched import NOISE, ONSET, STEPS, WITHIN, Work, from_onset, watch
from repository import ROOT

from rekindle.profiling.compute_time import faster
from rekindle.profiling.detector import Detector
from rekindle.profiling.findings import AWAY, Slow
from rekindle.profiling.series import BASELINE, LASTING, SKIPPED
from rekindle.profiling.steps import StepTimes


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("factor", [1.15, 1.5, 4.0])
def test_a_slow_rank(ranks: int, factor: float) -> None:
    (found,), detector = watch(ranks, from_onset(factor, 1))
    assert (found.kind, found.ranks) == (Slow.RANK, (1,))
    assert found.factor == pytest.approx(factor, rel=0.1)
    assert abs(found.since - ONSET) <= 3
    assert ONSET < found.found <= ONSET + WITHIN
    assert 0 < found.cost < 1
    assert found.may_be_sick
    assert [each.ranks for each in detector.findings] == [(1,)]


def test_half_of_all_ranks_slow_alike() -> None:
    found, _ = watch(8, from_onset(1.5, 0, 2, 5, 7))
    assert {each.ranks for each in found} == {(0,), (2,), (5,), (7,)}


def test_a_slow_node_is_one() -> None:
    """If all ranks of a node become slow, the detector reports the node, otherwise the rank."""
    (found,), _ = watch(8, from_onset(1.3, 4, 5, 6, 7), detector=Detector(per_node=4))
    assert (found.kind, found.ranks) == (Slow.NODE, (4, 5, 6, 7))
    (found,), _ = watch(8, from_onset(1.3, 5), detector=Detector(per_node=4))
    assert (found.kind, found.ranks) == (Slow.RANK, (5,))


def test_slow_loading_is_no_sick_rank() -> None:
    (found,), _ = watch(4, loading=from_onset(20, 2, usual=0.01))
    assert (found.kind, found.ranks) == (Slow.LOADING, (2,))
    assert not found.may_be_sick


GROUPS = {"dp 0": [0, 2, 4, 6], "dp 1": [1, 3, 5, 7], "tp 0": [0, 1]}


def test_a_slow_link() -> None:
    """If collectives of one group take longer, also for its last rank, the link is slow.

    No rank is slow.
    """

    def transfer(group: str, step: int) -> float:
        return 0.6 if group == "dp 1" and step >= ONSET else 0.2

    (found,), _ = watch(8, transfer=transfer, groups=GROUPS)
    assert (found.kind, found.group, found.ranks) == (Slow.LINK, "dp 1", (1, 3, 5, 7))
    assert found.factor == pytest.approx(3.0, rel=0.1)
    assert found.found <= ONSET + WITHIN
    assert found.cost > 0.1


def test_a_slow_rank_is_no_slow_link() -> None:
    """Longer waits for a slow rank are not a slow link."""
    found, _ = watch(8, from_onset(1.5, 3), transfer=lambda g, s: 0.2, groups=GROUPS)
    assert [(each.kind, each.ranks) for each in found] == [(Slow.RANK, (3,))]


def test_a_link_that_costs_little() -> None:
    """The detector does not report a slow link that takes a hundredth of the step."""

    def transfer(group: str, step: int) -> float:
        return 0.02 if group == "tp 0" and step >= ONSET else 0.01

    assert watch(8, transfer=transfer, groups=GROUPS)[0] == []


def test_slow_storage() -> None:
    def saving(rank: int, step: int) -> float:
        return (1.0 if rank == 3 and step >= ONSET else 0.2) if step % 4 == 0 else 0.0

    (found,), detector = watch(4, saving=saving)
    assert (found.kind, found.ranks) == (Slow.SAVING, (3,))
    assert found.factor == pytest.approx(5.0)
    assert [(each.kind, each.ranks) for each in detector.findings] == [(Slow.SAVING, (3,))]


def test_slow_saves_are_over_with_the_first_that_is_not() -> None:
    def saving(rank: int, step: int) -> float:
        return (1.0 if rank == 3 and 40 <= step < 80 else 0.2) if step % 4 == 0 else 0.0

    assert watch(4, saving=saving, steps=80)[1].findings
    assert watch(4, saving=saving, steps=81)[1].findings == []


def test_saves_of_steps_that_are_done_again() -> None:
    """After a roll back, the detector finds slow saves of steps with lower numbers."""

    detector = Detector()
    for done in range(81):
        step = done if done < 70 else done - 30
        saving = (2.0 if done >= 60 else 0.2) if done % 10 == 0 else 0.0
        detector.add(step, {0: StepTimes(step, 0, 1.0, 0.9, waiting=0.1, saving=saving)})
    ((kind, cost),) = [(each.kind, each.cost) for each in detector.findings]
    assert kind is Slow.SAVING
    assert cost == pytest.approx(1.8 / 12, abs=0.001)


def test_slow_saves_that_cost_next_to_nothing_are_not_told() -> None:
    def saving(rank: int, step: int) -> float:
        return (0.3 if rank == 3 and step >= ONSET else 0.1) if step % 30 == 0 else 0.0

    assert watch(4, saving=saving, steps=400)[0] == []


@pytest.mark.parametrize(
    ("work", "peers"),
    [
        (lambda rank, step: 1.3 if rank >= 6 else 1.0, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (lambda rank, step: 1.3 if rank >= 6 else 1.0, []),
        (lambda rank, step: random.Random(rank * 1000 + step).lognormvariate(0, 0.25), []),
        (lambda rank, step: 3.0 if (rank, step) in ((2, 40), (3, 41), (2, 42)) else 1.0, []),
        (lambda rank, step: 2.0 if rank == 2 and 40 <= step < 44 else 1.0, []),
        (lambda rank, step: 2.0 if step >= ONSET else 1.0, []),
    ],
    ids=["last-stage", "last-stage-unknown", "lengths", "hiccups", "a-moment", "all-alike"],
)
def test_nobody_is_sick(work: Work, peers: list[list[int]]) -> None:
    found, detector = watch(8, work, detector=Detector(peers))
    assert not [each for each in (*found, *detector.findings) if each.may_be_sick]


def test_uneven_work_is_said_to_be_that() -> None:
    found, _ = watch(4, lambda rank, step: 1.4 if rank == 3 else 1.0)
    assert [(each.kind, each.ranks) for each in found] == [(Slow.UNEVEN, (3,))]
    assert found[0].factor == pytest.approx(1.4, rel=0.05)


def test_it_is_over_when_it_is() -> None:
    def work(rank: int, step: int) -> float:
        return 1.5 if rank == 1 and ONSET <= step < ONSET + 20 else 1.0

    found, detector = watch(4, work, steps=ONSET + 45)
    assert len(found) == 1
    assert detector.findings == []


def found_after_each(detector: Detector, work: Work, steps: int) -> list[set[tuple[Slow, int]]]:
    """Return the findings after each step, by rank; four ranks have equal batches."""
    chance, found = random.Random(2), []
    for step in range(steps):
        own = {rank: work(rank, step) * chance.lognormvariate(0, NOISE) for rank in range(4)}
        total = max(own.values())
        detector.add(
            step, {r: StepTimes(step, 0, total, own[r], waiting=total - own[r]) for r in own}
        )
        found.append({(each.kind, rank) for each in detector.findings for rank in each.ranks})
    return found


def test_a_slow_rank_whose_peers_become_faster_later_is_slow_no_more() -> None:
    """If the peers of a slow rank become faster and it recovers, it has uneven work."""

    def work(rank: int, step: int) -> float:
        if rank != 1:
            return 0.8 if step >= 200 else 1.0
        return 1.2 if ONSET <= step < 300 else 1.0

    found = found_after_each(Detector(), work, 400)
    assert found[199] == {(Slow.RANK, 1)}
    assert found[-1] == {(Slow.UNEVEN, 1)}


def test_a_slow_rank_is_told_until_its_node_is() -> None:
    """The detector reports a slow rank until it reports the node, and then the slow node.

    The ranks of the node may become slow at different steps.
    """

    def work(rank: int, step: int) -> float:
        return 1.5 if (rank == 3 and step >= 100) or (rank == 2 and step >= 200) else 1.0

    found = found_after_each(Detector(per_node=2), work, 400)
    assert all(each & {(Slow.RANK, 3), (Slow.NODE, 3)} for each in found[120:])
    assert all(each == {(Slow.NODE, 2), (Slow.NODE, 3)} for each in found[220:])


CROWDED = 800  # a number of steps


def _crowded(rank: int, step: int) -> float:
    """Return the work of ranks that share too few cores, with one or two time slices."""
    chance = random.Random(rank * 10_000 + step)
    return chance.choice((1.0, 1.6)) * chance.lognormvariate(0, 0.2)


def test_a_slow_rank_among_crowded_ones_is_told_once() -> None:
    """Some odd steps do not end a finding, also in hundreds of steps; its real end does."""

    def work(rank: int, step: int) -> float:
        return _crowded(rank, step) + (1.0 if rank == 3 and 100 <= step < CROWDED else 0.0)

    found, detector = watch(4, work, steps=CROWDED)
    assert [(each.kind, each.ranks) for each in found] == [(Slow.RANK, (3,))]
    assert [each.ranks for each in detector.findings] == [(3,)]
    _, detector = watch(4, work, steps=CROWDED + 2 * LASTING)
    assert detector.findings == []


def test_crowded_ranks_are_not_now_and_then_uneven() -> None:
    assert watch(4, _crowded, steps=CROWDED)[0] == []


def test_a_rank_that_is_not_there_for_a_while() -> None:
    """The detector accepts a world that shrinks and grows, a new rank, and no rank."""
    detector = Detector()
    for step in range(STEPS):
        times = {r: StepTimes(step, 0, 1.0, 0.9) for r in range(4) if r != 2 or step % 3}
        assert detector.add(step, times) == []
    assert detector.add(STEPS, {}) == []
    assert detector.add(STEPS + 1, {7: StepTimes(STEPS + 1, 0, 1.0, 9.0)}) == []


def test_who_is_slow_is_so_while_it_is_away_for_some_steps() -> None:
    """A finding stays for AWAY steps without the rank, as records of ended ranks end apart."""
    _, detector = watch(4, from_onset(1.5, 1))
    for step in range(STEPS, STEPS + AWAY + 1):
        assert [each.ranks for each in detector.findings] == [(1,)]
        detector.add(step, {r: StepTimes(step, 0, 1.0, 0.9, waiting=0.1) for r in (0, 2, 3)})
    assert detector.findings == []


def test_work_that_takes_no_time() -> None:
    found, _ = watch(4, lambda rank, step: 0.0)
    assert found == []


def test_nothing_is_said_before_there_is_a_baseline() -> None:
    found, _ = watch(4, from_onset(4.0, 1), steps=SKIPPED + BASELINE)
    assert found == []


def test_the_page_has_the_number_of_steps_until_the_first_finding() -> None:
    """docs/operate/profiling.md has how many steps the earliest finding of a rank needs."""

    def first(onset: int, kind: Slow) -> int:
        found, _ = watch(4, lambda rank, step: 4.0 if rank == 1 and step >= onset else 1.0)
        return min(each.found + 1 for each in found if each.kind is kind)

    page = (ROOT / "docs" / "operate" / "profiling.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith("| first finding |")]
    later = range(SKIPPED + BASELINE, ONSET)
    numbers = first(SKIPPED, Slow.UNEVEN), min(first(onset, Slow.RANK) for onset in later)
    assert [int(each) for each in re.findall(r"after (\d+) recorded steps", row)] == [*numbers]


def test_faster_half() -> None:
    assert faster([9.0, 1.0, 8.0, 2.0]) == 1.5
    assert faster([3.0]) == 3.0


def test_a_slow_loader_where_collectives_are_not_recorded() -> None:
    """Without records of collectives, slow loading has one finding, although all ranks wait."""
    (found,), _ = watch(4, loading=from_onset(20, 2, usual=0.01), recorded=lambda step: False)
    assert (found.kind, found.ranks) == (Slow.LOADING, (2,))


def test_records_of_collectives_that_begin_later() -> None:
    """After the first records of collectives, a rank that always had more work is uneven."""
    found, _ = watch(
        8,
        lambda rank, step: 1.4 if rank == 3 else 1.0,
        recorded=lambda step: step >= ONSET,
        steps=90,
    )
    assert [(each.kind, each.ranks) for each in found] == [(Slow.UNEVEN, (3,))]


def test_peers_that_become_faster() -> None:
    """A rank whose peers become faster is not slow, although all wait for it."""
    found, _ = watch(8, lambda rank, step: 0.7 if rank and step >= ONSET else 1.0)
    assert [each for each in found if each.may_be_sick] == []


def test_ranks_whose_work_comes_in_long_pieces() -> None:
    """Documents of different lengths, each for five steps, do not make a rank slow."""
    chance = random.Random(4)
    pieces = [[chance.lognormvariate(0, 0.1) for _ in range(60)] for _ in range(8)]
    found, _ = watch(8, lambda rank, step: pieces[rank][step // 5], steps=300)
    assert [each for each in found if each.may_be_sick] == []


def test_a_baseline_in_which_machines_become_warm_is_none() -> None:
    """If machines become faster during the baseline, it starts again."""
    found, _ = watch(
        16,
        lambda rank, step: 1.3 if rank >= 4 and step < 12 else 1.0,
        detector=Detector(per_node=4),
    )
    assert found == []


def test_longer_batches_are_no_slow_link() -> None:
    """Longer batches also send more data, so the link is not slow."""
    found, _ = watch(
        4,
        lambda rank, step: 2.0 if step >= ONSET else 1.0,
        transfer=lambda group, step: 0.4 if step >= ONSET else 0.2,
        groups={"dp": [0, 1, 2, 3]},
    )
    assert found == []


@pytest.mark.parametrize("seconds", [0.0, 1e-12])
def test_steps_that_take_no_time(seconds: float) -> None:
    detector = Detector()
    for step in range(60):
        times = {r: StepTimes(step, 0, seconds, seconds, loading=seconds) for r in range(3)}
        assert detector.add(step, times) == []
