"""The diagnosis of a hang: which rank is the cause, by the inspections of all ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import msgspec

from rekindle.profiling.blocked_collectives import Stuck, stuck
from rekindle.protocol.heartbeat_page import BUSY_S, RankActivity
from rekindle.protocol.monitoring import RankInspection
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.history import Past, since_last_step

# Limit for ranks that all rest, if none waits for another. Such ranks do not hang: a data source or
# a file system that all need is missing, or the script has a reason to pause.
PAUSE_S = 300.0

# A rank that began its activity more recently than this has just made progress.
MOVED_ON_S = 1.0

T = TypeVar("T")
_STEPS = (RankActivity.FIRST, RankActivity.STEP)
_AT = {
    RankActivity.OUTSIDE: "outside of a Session",
    RankActivity.MEETING: "forming a generation",
    RankActivity.FIRST: "in the first step of a generation",
    RankActivity.STEP: "in a step",
    RankActivity.BETWEEN: "between two steps",
    RankActivity.CHECKPOINT: "writing a snapshot of its state",
    RankActivity.EVALUATE: "evaluating",
    RankActivity.COMPILE: "compiling",
}


class HangDiagnosis(msgspec.Struct, frozen=True):
    """The ranks hang. rank: the cause; -1: unknown. why: the reason as text.

    sure: a second inspection is not needed. more: diagnoses of other ranks that also cause the
    hang.
    """

    rank: int
    why: str
    sure: bool = True
    more: tuple[HangDiagnosis, ...] = ()


def judge(results: Sequence[RankInspection]) -> HangDiagnosis | None:
    """Return the diagnosis if these ranks hang; None: they do not, or not yet.

    A stopped rank is the cause before any other rank. Otherwise the cause is a rank that is late
    with its own activity while others wait for it. If all ranks wait, one of them is in another
    collective than the others.
    """
    stopped = [result for result in results if result.stopped]
    absent = [result for result in results if not result.waiting]
    late = [result for result in absent if result.late]
    outside = all(result.doing is RankActivity.OUTSIDE for result in results)
    if not any(result.late for result in results):
        return None  # the late ranks have made progress
    if outside and not all(result.late for result in results):
        return None  # without a Session, the only sign is that all ranks rest
    if stopped:
        first, *more = (_blame(result, "is stopped by a signal", results) for result in stopped)
        return msgspec.structs.replace(first, more=tuple(more))
    if absent and not late:
        return None  # these ranks have time left, and all others wait for them
    if not (outside or _waited_for(results)):
        return _judge_unwaited(results)
    if late:
        return _judge_absent(late, results)
    if min(result.elapsed_s for result in results) < MOVED_ON_S:
        return None
    return _judge_waiting(results)


def _waited_for(results: Sequence[RankInspection]) -> bool:
    """Return whether some ranks wait for others."""
    return any(result.waiting or result.doing is RankActivity.MEETING for result in results)


def _judge_unwaited(results: Sequence[RankInspection]) -> HangDiagnosis | None:
    """Judge ranks if none of them waits.

    All may need the same missing resource. They may also wait for a device, because a rank waits
    for other ranks on its device. Therefore one rank is the cause only if all others are late with
    a step, and it differs from all of them.
    """
    if not all(result.late for result in results):
        return None
    resting = [result for result in results if not result.busy]
    found = resting[0] if len(resting) == 1 else _only(results, _where)
    others = [result for result in results if result is not found] or results
    if found is not None and all(result.doing in _STEPS for result in others):
        return _blame(found, _does(found), results)
    return _judge_alike(results, PAUSE_S if resting else BUSY_S)


def _judge_absent(
    late: Sequence[RankInspection], results: Sequence[RankInspection]
) -> HangDiagnosis | None:
    """Find the cause among the late ranks that do not wait: the rank that differs."""
    by_number = (
        _waited_for(results) or len(results) == 1
    )  # the waiting ranks wait for the few others
    found = late[0] if by_number and len(late) == 1 else _behind(late) or _odd(late, _where)
    if found is None and by_number and 2 * len(late) <= len(results):
        found = late[0]
    if found is None:
        known = any(result.waiting or result.doing is RankActivity.OUTSIDE for result in results)
        return _judge_alike(late, 0.0 if known else PAUSE_S)
    return _blame(found, _does(found), results)


def _does(result: RankInspection) -> str:
    does = "computes without end" if result.busy else "makes no progress"
    return f"{does}, {_AT[result.doing]}"


def _judge_alike(results: Sequence[RankInspection], limit_s: float) -> HangDiagnosis | None:
    """Return a diagnosis without a cause if all ranks have done the same for `limit_s`."""
    if min(result.elapsed_s for result in results) < limit_s:
        return None
    return HangDiagnosis(-1, f"{_names(results)} make no progress, {_AT[results[0].doing]}")


def _judge_waiting(results: Sequence[RankInspection]) -> HangDiagnosis:
    """Find the rank that is in another collective than the others, or did not join theirs."""
    for each in missed(results):
        there = [result for result in results if result.rank in each.missing]
        return HangDiagnosis(there[0].rank, f"{each.in_words()}; {_does(there[0])}")
    found = (
        _astray(results)
        or _least(results, _operations)
        or _odd(results, _where)
        or _behind(results)
    )
    if found is None:
        return HangDiagnosis(-1, f"{_names(results)} wait for each other in a collective")
    return _blame(found, "waits in another collective than the others", results)


def missed(results: Sequence[RankInspection]) -> list[Stuck]:
    """Return the collectives that some ranks have not joined, according to the ranks' records.

    A collective with fewer missing ranks comes first. The result is empty if a rank has no record.
    """
    positions = {result.rank: result.position for result in results if result.position is not None}
    found = stuck(positions) if len(positions) == len(results) else []
    return sorted(found, key=lambda each: len(each.missing))


def _astray(results: Sequence[RankInspection]) -> RankInspection | None:
    """Return the rank that began another collective than most, at the first difference."""
    begun: dict[int, dict[int, int]] = {}  # number of the collective -> place in results -> mark
    for place, result in enumerate(results):
        for number, mark in enumerate(result.recent, result.operations - len(result.recent)):
            begun.setdefault(number, {})[place] = mark
    differ = [marks for _, marks in sorted(begun.items()) if len(set(marks.values())) > 1]
    odd = _odd(list(differ[0].items()), lambda item: item[1]) if differ else None
    return results[odd[0]] if odd else None


def described(result: RankInspection) -> str:
    """Describe in one line the activity of an inspected rank."""
    does = "stopped by a signal" if result.stopped else "waits for others" if result.waiting else ""
    does = does or ("computes" if result.busy else "rests")
    description = f"rank {result.rank}: {_AT[result.doing]} for {result.elapsed_s:.0f} s, {does}"
    return f"{description}, at {result.where}" if result.where else description


def _blame(result: RankInspection, does: str, results: Sequence[RankInspection]) -> HangDiagnosis:
    others = [other for other in results if other.waiting and other is not result]
    description = f"rank {result.rank} {does}"
    if others and not result.waiting:
        description += f", and {_names(others)} wait for it"
    innermost = result.where.partition(" < ")[0]
    # Between steps a script may do anything, and may also rest for a moment.
    certain = result.doing in (*_STEPS, RankActivity.OUTSIDE) and (bool(others) or result.waiting)
    why = f"{description}; it is at {innermost}" if innermost else description
    return HangDiagnosis(result.rank, why, sure=result.stopped or certain)


def _names(results: Sequence[RankInspection]) -> str:
    if len(results) > 4:
        return f"{len(results)} ranks"
    return ("rank " if len(results) == 1 else "ranks ") + ", ".join(
        str(result.rank) for result in results
    )


def _where(result: RankInspection) -> str:
    return result.where


def _operations(result: RankInspection) -> int:
    return result.operations


def _behind(results: Sequence[RankInspection]) -> RankInspection | None:
    """Return the rank that has finished fewer steps than all others, or None."""
    return _least(results, lambda result: result.finished)


def _least(
    results: Sequence[RankInspection], number: Callable[[RankInspection], int]
) -> RankInspection | None:
    first, *others = sorted(results, key=number)
    return first if others and number(first) < number(others[0]) else None


def _only(
    results: Sequence[RankInspection], trait: Callable[[RankInspection], Hashable]
) -> RankInspection | None:
    """Return the rank that differs in a trait from all others, if the others are alike."""
    counts = Counter(map(trait, results))
    found = next((result for result in results if counts[trait(result)] == 1), None)
    return found if len(results) > 2 and len(counts) == 2 else None


def _odd(those: Sequence[T], trait: Callable[[T], Hashable]) -> T | None:
    """Return the first item that differs in a trait from more than half of all, or None."""
    common, count = Counter(map(trait, those)).most_common(1)[0]
    if 2 * count <= len(those):
        return None
    return next((each for each in those if trait(each) != common), None)


def hang_place(result: RankInspection) -> str:
    """Return the place where a rank hangs: its activity.

    It has no frames, because a rank that repeats a request is in other frames at each inspection.
    """
    doing = RankActivity.STEP if result.doing in _STEPS else result.doing
    return f"{FaultKind.HANG.value}: {_AT[doing]}"


def hangs_here(past: Sequence[Past], result: RankInspection, newest: int) -> int:
    """Return how often the rank has hung at this place since the last finished step of the job."""
    return sum(
        each.fault.kind is FaultKind.HANG
        and each.fault.rank in (result.rank, -1)
        and each.fault.signature == hang_place(result)
        for each in since_last_step(past, newest)
    )


def with_patience(past: Sequence[Past], result: RankInspection, newest: int) -> RankInspection:
    """Return the inspection with twice the limit for each earlier hang at the same place.

    The limit stays below BUSY_S. A rank that waits for others or that a signal stopped is not slow.
    """
    hangs = hangs_here(past, result, newest)
    if not hangs or result.waiting or result.stopped:
        return result
    longest_s = max(result.limit_s, BUSY_S)
    limit_s = min(result.limit_s * 2.0**hangs, longest_s)
    return msgspec.structs.replace(result, limit_s=limit_s)
