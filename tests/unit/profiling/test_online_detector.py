"""The online detector combines steps that ranks report at different times."""

from __future__ import annotations

from rekindle.profiling import detector as p
from rekindle.profiling.detector import OnlineDetector
from rekindle.profiling.findings import Finding, Slow
from rekindle.profiling.steps import StepTimes

RANKS = range(4)


def steps(
    first: int, end: int, rank: int = 0, factor: float = 1.0, loading: float = 0.0
) -> list[StepTimes]:
    """Return steps whose times vary a little."""
    return [
        StepTimes(
            step=step,
            start=step,
            seconds=0.1,
            own=0.05 * factor * (1 + 0.002 * ((step * 7 + rank * 3) % 5)) + loading,
            loading=loading,
        )
        for step in range(first, end)
    ]


def all_tell(pace: OnlineDetector, first: int, end: int, slow: int = -1) -> tuple[list, list]:
    return pace.add({r: steps(first, end, r, 1.5 if r == slow else 1.0) for r in RANKS})


def test_ranks_tell_in_any_order() -> None:
    """The detector reports a finding once, after all ranks have reported the step."""
    pace = OnlineDetector(RANKS, per_node=1)
    found = []
    for rank in (2, 0, 3, 1):
        for first in (0, 30, 45):
            end = {0: 30, 30: 45, 45: 80}[first]
            factor = 1.5 if rank == 2 and first else 1.0
            new, over = pace.add({rank: steps(first, end, rank, factor)})
            found += new
            assert not over
    assert [(each.kind, each.ranks) for each in found] == [(Slow.RANK, (2,))]
    assert pace.holding == found
    assert abs(found[0].since - 30) <= 2
    assert found[0].found - 30 <= 20
    again, _ = all_tell(pace, 80, 100, slow=2)
    assert not again


def test_what_is_over_may_come_again() -> None:
    pace = OnlineDetector(RANKS, per_node=1)
    all_tell(pace, 0, 30)
    assert all_tell(pace, 30, 60, slow=1)[0]
    _, over = all_tell(pace, 60, 120)
    assert [each.ranks for each in over] == [(1,)]
    assert not pace.holding
    found, _ = all_tell(pace, 120, 160, slow=1)
    assert [each.ranks for each in found] == [(1,)]


def test_a_slow_rank_that_becomes_slower() -> None:
    """A mild slowness that lasts does not hide a severe one of the same rank."""
    pace = OnlineDetector(RANKS, per_node=1)

    def found_until(end: int, factor: float) -> list[Finding]:
        first = end - 60
        reports = {r: steps(first, end, r, factor if r == 2 else 1.0) for r in RANKS}
        new, over = pace.add(reports)
        assert not over
        return new

    assert not found_until(60, 1.0)
    (mild,) = found_until(120, 1.2)
    assert not found_until(180, 1.25)
    (severe,) = found_until(240, 4.0)
    assert (severe.kind, severe.ranks) == (Slow.RANK, (2,))
    assert severe.factor > p.GROWN * mild.factor
    assert severe.found > 180
    assert pace.holding == [severe]
    assert not found_until(300, 4.0)


def test_uneven_work_that_grows_is_one_finding() -> None:
    """A finding that never leads to an action is reported once."""
    pace = OnlineDetector(RANKS, per_node=1)
    found = []
    for first, factor in ((0, 1.3), (60, 2.6), (120, 5.2)):
        reports = {r: steps(first, first + 60, r, factor if r == 2 else 1.0) for r in RANKS}
        new, _ = pace.add(reports)
        found += [each for each in new if each.kind is Slow.UNEVEN]
    assert len(found) == 1


def test_steps_that_are_done_again() -> None:
    """After a roll back, late reports of earlier steps do not disturb the detector."""
    pace = OnlineDetector(RANKS, per_node=1)
    all_tell(pace, 0, 40)
    pace.go_back(20)
    pace.add({0: steps(35, 41)})
    found, _ = all_tell(pace, 21, 30)
    assert not found
    found, _ = all_tell(pace, 30, 70, slow=3)
    assert [each.ranks for each in found] == [(3,)]


def test_a_rank_that_tells_nothing_holds_up_nobody_for_ever() -> None:
    """If a rank does not report, the number of pending steps is limited."""
    pace = OnlineDetector(RANKS, per_node=1)
    for first in range(0, 3 * p.MOST_PENDING, 1000):
        pace.add({rank: steps(first, first + 1000, rank) for rank in (0, 1, 2)})
    assert len(pace._pending) <= p.MOST_PENDING


def test_ranks_outside_of_the_world_do_not_count() -> None:
    """The detector ignores reports of a rank that is not in the world."""
    pace = OnlineDetector((0, 1), per_node=1)
    pace.add({5: steps(0, 10)})
    assert not pace._pending


def test_uneven_work_of_many_is_one_finding() -> None:
    pace = OnlineDetector(range(8), per_node=1)
    found = []
    for first in (0, 15, 30):
        new, _ = pace.add(
            {r: steps(first, first + 15, r, 1.5 if r in (6, 7) else 1.0) for r in range(8)}
        )
        found += new
    assert [(each.kind, each.ranks) for each in found] == [(Slow.UNEVEN, (6, 7))]


def test_ranks_whose_node_stays_are_known_when_others_change() -> None:
    """If other ranks change, a slow rank stays slow, and does not become uneven."""
    pace = OnlineDetector(RANKS, per_node=1)
    all_tell(pace, 0, 30)
    assert all_tell(pace, 30, 60, slow=2)[0]
    pace.change(RANKS, [0])
    pace.go_back(60)
    found, over = all_tell(pace, 61, 140, slow=2)
    assert (found, over) == ([], [])
    assert [(each.kind, each.ranks) for each in pace.holding] == [(Slow.RANK, (2,))]


def test_ranks_on_another_node_are_new() -> None:
    """A rank on a new node starts without a finding, and its old finding has no end."""
    pace = OnlineDetector(RANKS, per_node=1)
    all_tell(pace, 0, 30)
    assert all_tell(pace, 30, 60, slow=2)[0]
    pace.change(RANKS, [2])
    assert not pace.holding
    found, over = all_tell(pace, 60, 120)
    assert (found, over) == ([], [])
    found, _ = all_tell(pace, 120, 150, slow=2)
    assert [(each.kind, each.ranks) for each in found] == [(Slow.RANK, (2,))]


def test_a_world_that_shrinks_and_grows() -> None:
    """A step is complete with the current ranks; a rank that returns starts a new baseline."""
    pace = OnlineDetector(RANKS, per_node=1)
    all_tell(pace, 0, 30)
    pace.change([0, 1, 2], [])
    found, _ = pace.add({r: steps(30, 60, r, 1.5 if r == 1 else 1.0) for r in range(3)})
    assert [(each.kind, each.ranks) for each in found] == [(Slow.RANK, (1,))]
    pace.change(RANKS, [3])
    found, over = all_tell(pace, 60, 100, slow=1)
    assert (found, over) == ([], [])


def test_a_group_whose_ranks_all_have_more_to_do_is_uneven() -> None:
    """With known groups, a group with more work is uneven; without them its node may be faulty."""
    findings = []
    for peers in ([[0, 1], [2, 3]], []):
        pace = OnlineDetector(RANKS, per_node=2, peers=peers)
        all_tell(pace, 0, 40)
        found, _ = pace.add({r: steps(40, 80, r, 1.3 if r >= 2 else 1.0) for r in RANKS})
        findings += [(each.kind, each.ranks, each.may_be_sick) for each in found]
    assert findings == [(Slow.UNEVEN, (2, 3), False), (Slow.NODE, (2, 3), True)]


def test_uneven_work_that_is_over_is_one_finding_as_well() -> None:
    pace = OnlineDetector(range(8), per_node=1)
    over = []
    for first, factor in ((0, 1.5), (40, 1.0), (80, 1.0)):
        _, gone = pace.add(
            {r: steps(first, first + 40, r, factor if r in (6, 7) else 1.0) for r in range(8)}
        )
        over += gone
    assert [(each.kind, each.ranks) for each in over] == [(Slow.UNEVEN, (6, 7))]
    assert not pace.holding
