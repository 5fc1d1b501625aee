"""The cause of a hang: `judge` names a rank from the inspections of all agents."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rekindle.coordinator.machine.hang_diagnosis import PAUSE_S, judge
from rekindle.protocol.heartbeat_page import BUSY_S, RankActivity
from rekindle.protocol.monitoring import RankInspection

MARKS = (11, 22, 33)  # marks of collectives, in the order of the script


def inspection(rank: int, *, late: bool = True, **fields: Any) -> RankInspection:
    """Return the inspection of a rank that is late in step 8."""
    fields = {"finished": 7, "doing": RankActivity.STEP, "elapsed_s": 12.0} | fields
    return RankInspection(rank=rank, limit_s=0.0 if late else math.inf, **fields)


def waits(rank: int, operations: int = 3, **fields: Any) -> RankInspection:
    """Return the inspection of a rank that waits for others in its last collective.

    `operations` is the number of collectives that it has started.
    """
    fields = {"where": "all_reduce (train.py:9)", "recent": MARKS[:operations]} | fields
    return inspection(rank, waiting=True, operations=operations, **fields)


def all_but(*results: RankInspection, of: int = 4) -> list[RankInspection]:
    """Return these inspections. All other ranks wait."""
    given = {each.rank: each for each in results}
    return [given.get(rank) or waits(rank) for rank in range(of)]


@pytest.mark.parametrize(
    ("culprit", "says"),
    [
        (inspection(2), "rank 2 makes no progress, in a step, and ranks 0, 1, 3 wait for it"),
        (inspection(2, busy=True), "rank 2 computes without end, in a step"),
        (inspection(2, doing=RankActivity.BETWEEN), "between two steps"),
        (inspection(2, stopped=True, late=False), "rank 2 is stopped by a signal"),
        (waits(2, 2, where="recv (x.py:1) < f"), "waits in another collective"),
        (inspection(2, where="read (data.py:3) < get (data.py:9)"), "; it is at read (data.py:3)"),
    ],
)
def test_the_rank_that_did_not_join_the_others(culprit: RankInspection, says: str) -> None:
    """The one rank that did not join the others' collective is the cause, in any activity."""
    verdict = judge(all_but(culprit))
    assert verdict is not None
    assert verdict.rank == 2
    assert says in verdict.why


@pytest.mark.parametrize(
    "results",
    [
        all_but(inspection(2, late=False, doing=RankActivity.EVALUATE)),
        all_but(
            inspection(0, late=False, doing=RankActivity.CHECKPOINT), inspection(1, late=False)
        ),
        [inspection(rank, late=False) for rank in range(4)],
        [waits(rank, late=False) for rank in range(4)],
        [inspection(rank, busy=True) for rank in range(4)],
        [inspection(rank, where="read (data.py:3)") for rank in range(4)],
        [inspection(0, doing=RankActivity.BETWEEN)],
    ],
    ids=["evaluation", "checkpoint", "went on", "waits go on", "all compute", "all rest", "alone"],
)
def test_ranks_that_have_time_left_do_not_hang(results: list[RankInspection]) -> None:
    """Ranks with time left do not hang, and a rank that waits for them is not at fault.

    All ranks may also compute for a long time.
    """
    assert judge(results) is None


@pytest.mark.parametrize(("busy", "limit_s"), [(True, BUSY_S), (False, PAUSE_S)])
def test_what_all_ranks_do_has_an_end(busy: bool, limit_s: float) -> None:
    """If all ranks compute for half an hour or rest for five minutes, they hang without a cause."""
    verdict = judge([inspection(rank, busy=busy, elapsed_s=limit_s) for rank in range(4)])
    assert verdict is not None
    assert verdict.rank == -1


def test_one_of_two_absent_ranks_has_time_left() -> None:
    """If one of two absent ranks has time left, the other rank is the cause."""
    verdict = judge(
        all_but(inspection(0, late=False, doing=RankActivity.CHECKPOINT), inspection(3))
    )
    assert verdict is not None
    assert verdict.rank == 3


def test_of_several_that_are_absent_the_one_behind() -> None:
    """If several ranks are absent, the rank with fewer finished steps is the cause.

    It may delay the others in a way that the inspections do not show.
    """
    verdict = judge(all_but(inspection(1), inspection(3, finished=6)))
    assert verdict is not None
    assert verdict.rank == 3


def test_of_ranks_that_show_no_collectives_the_odd_one() -> None:
    """If no rank shows a collective, the rank at another place in the code is the cause.

    This occurs on accelerators, where a rank only enqueues a collective.
    """
    results = [inspection(rank, where="item (train.py:40)") for rank in range(4)]
    results[1] = inspection(1, where="read (data.py:3)")
    verdict = judge(results)
    assert verdict is not None
    assert verdict.rank == 1


def test_nobody_is_blamed_where_all_are_alike() -> None:
    """If all or most ranks look alike, the verdict names no rank.

    The cause may be a broken network, or a file system that most ranks wait for.
    """
    most = [inspection(0), inspection(1), inspection(2), waits(3)]
    for results in ([waits(rank) for rank in range(4)], most):
        verdict = judge(results)
        assert verdict is not None
        assert verdict.rank == -1


def test_another_collective_than_the_others() -> None:
    """A rank in another collective is the cause, even if other ranks are further behind.

    The first collective that differs decides.
    """
    results = [waits(0, 2), waits(1), waits(2, 2, recent=(11, 99)), waits(3)]
    verdict = judge(results)
    assert verdict is not None
    assert verdict.rank == 2


def test_a_collective_that_a_rank_has_left_out() -> None:
    """A rank that skipped a collective is the cause: it waits in the next one."""
    results = [waits(0, 2), waits(1, 2), waits(2, 2, recent=(11, 33)), waits(3, 2)]
    verdict = judge(results)
    assert verdict is not None
    assert verdict.rank == 2


def test_two_ranks_of_which_one_began_less() -> None:
    """If two ranks wait, the rank that started fewer collectives is the cause."""
    verdict = judge([waits(0, 1), waits(1, 2)])
    assert verdict is not None
    assert verdict.rank == 0


def test_a_script_without_a_session_hangs_when_all_its_ranks_rest() -> None:
    """A script without a Session hangs only when all its ranks rest.

    The rank at another place in the code is then the cause.
    """
    rests = {"doing": RankActivity.OUTSIDE, "elapsed_s": 400.0}
    results = [waits(rank, 0, **rests) for rank in range(3)]
    stuck = inspection(3, where="read (data.py:3)", **rests)
    assert (
        judge([*results, inspection(3, busy=True, doing=RankActivity.OUTSIDE, late=False)]) is None
    )
    verdict = judge([*results, stuck])
    assert verdict is not None
    assert verdict.rank == 3


READS = "read (data.py:3)"


@pytest.mark.parametrize("late", [[2], [1, 3]])
def test_nobody_is_blamed_for_what_all_miss(late: list[int]) -> None:
    """A data source that stalls all ranks is not a hang, even if some ranks are late earlier."""
    results = [inspection(rank, where=READS, late=rank in late) for rank in range(4)]
    assert judge(results) is None
    assert judge([inspection(rank, where=READS) for rank in range(4)]) is None


@pytest.mark.parametrize("elsewhere", [[1], [1, 2]])
def test_of_ranks_that_all_compute_the_one_elsewhere(elsewhere: list[int]) -> None:
    """If all ranks compute, one rank at another place is the cause, with less certainty.

    On an accelerator, a rank that waits for others also computes. If several ranks differ, there is
    no verdict.
    """
    results = [inspection(rank, busy=True, where="item (train.py:40)") for rank in range(5)]
    for rank in elsewhere:
        results[rank] = inspection(rank, busy=True, where=f"spin (train.py:{rank})")
    verdict = judge(results)
    if len(elsewhere) > 1:
        assert verdict is None
        return
    assert verdict is not None
    assert (verdict.rank, verdict.sure) == (1, False)
    assert judge([inspection(0, busy=True, late=False), *results[1:]]) is None


def test_the_one_that_rests_while_others_compute() -> None:
    """If the other rank computes, the rank that rests is the cause, even with only two ranks."""
    spins = inspection(0, busy=True, where="item (train.py:40)")
    verdict = judge([spins, inspection(1, doing=RankActivity.BETWEEN, where=READS)])
    assert verdict is not None
    assert verdict.rank == 1


def test_all_stopped_ranks_are_to_blame() -> None:
    """All ranks that a signal has stopped are causes, because none of them can leave its step."""
    verdict = judge(all_but(inspection(1, stopped=True), inspection(3, stopped=True)))
    assert verdict is not None
    assert [verdict.rank, *(more.rank for more in verdict.more)] == [1, 3]
    assert verdict.sure


def test_ranks_that_have_just_moved_on_do_not_hang() -> None:
    """If all other ranks have just entered the next collective, a late rank does not hang."""
    results = [waits(0), *(waits(rank, elapsed_s=0.1, late=False) for rank in (1, 2, 3))]
    assert judge(results) is None


@pytest.mark.parametrize(
    ("doing", "sure"),
    [(RankActivity.STEP, True), (RankActivity.FIRST, True), (RankActivity.BETWEEN, False)],
)
def test_between_steps_it_takes_a_second_look(doing: RankActivity, sure: bool) -> None:
    """Between steps, a first inspection is not sure, because a script may do anything there."""
    verdict = judge(all_but(inspection(2, doing=doing)))
    assert verdict is not None
    assert (verdict.rank, verdict.sure) == (2, sure)
