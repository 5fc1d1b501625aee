"""Whether the ranks hang, and because of whom: the one that did not join the others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import msgspec

from rekindle.agent.hang_limits import BUSY_S
from rekindle.profiling.blocked_collectives import Stuck, stuck
from rekindle.protocol.heartbeat_page import Doing
from rekindle.protocol.monitoring import RankLook

# How long all ranks may rest without one that waits for another: not they hang, but what they all
# need is missing (a data source, a file system), or the script has its reasons.
PAUSE_S = 300.0

# Who began what it is at more recently than that has just moved on.
MOVED_ON_S = 1.0

T = TypeVar("T")
_STEPS = (Doing.FIRST, Doing.STEP)
_AT = {
    Doing.OUTSIDE: "outside of a Session",
    Doing.MEETING: "forming a generation",
    Doing.FIRST: "in the first step of a generation",
    Doing.STEP: "in a step",
    Doing.BETWEEN: "between two steps",
    Doing.CHECKPOINT: "keeping its state",
    Doing.EVALUATE: "evaluating",
    Doing.COMPILE: "compiling",
}


class Verdict(msgspec.Struct, frozen=True):
    """The ranks hang. rank: the cause; -1: unknown. why: the reason as text.

    sure: no second look is needed. more: verdicts about other ranks that cause it too.
    """

    rank: int
    why: str
    sure: bool = True
    more: tuple[Verdict, ...] = ()


def judge(looks: Sequence[RankLook]) -> Verdict | None:
    """Say whether these ranks hang; None: they do not, or not yet.

    Stopped ranks are to blame before any other; then one that is late with something of its own
    while others wait for it. If all wait, somebody is in another collective than the rest.
    """
    stopped = [look for look in looks if look.stopped]
    absent = [look for look in looks if not look.waiting]
    late = [look for look in absent if look.late]
    outside = all(look.doing is Doing.OUTSIDE for look in looks)
    if not any(look.late for look in looks):
        return None  # whoever was has gone on
    if outside and not all(look.late for look in looks):
        return None  # of a script without a Session nothing is known but that all its ranks rest
    if stopped:
        first, *more = (_blame(look, "is stopped by a signal", looks) for look in stopped)
        return msgspec.structs.replace(first, more=tuple(more))
    if absent and not late:
        return None  # they have time left, and all others wait for them
    if not (outside or _waited_for(looks)):
        return _judge_unwaited(looks)
    if late:
        return _judge_absent(late, looks)
    if min(look.elapsed_s for look in looks) < MOVED_ON_S:
        return None
    return _judge_waiting(looks)


def _waited_for(looks: Sequence[RankLook]) -> bool:
    """Whether some ranks wait for others."""
    return any(look.waiting or look.doing is Doing.MEETING for look in looks)


def _judge_unwaited(looks: Sequence[RankLook]) -> Verdict | None:
    """Judge ranks none of which waits.

    All may miss the same; or they wait for a device, which is how they wait for others there. So
    one is to blame only if all others are late with a step, and it differs from all of them.
    """
    if not all(look.late for look in looks):
        return None
    resting = [look for look in looks if not look.busy]
    found = resting[0] if len(resting) == 1 else _only(looks, _where)
    others = [look for look in looks if look is not found] or looks
    if found is not None and all(look.doing in _STEPS for look in others):
        return _blame(found, _does(found), looks)
    return _judge_alike(looks, PAUSE_S if resting else BUSY_S)


def _judge_absent(late: Sequence[RankLook], looks: Sequence[RankLook]) -> Verdict | None:
    """Blame the odd one of those that are late and wait for nobody."""
    by_number = _waited_for(looks) or len(looks) == 1  # others wait for the few that do not
    found = late[0] if by_number and len(late) == 1 else _behind(late) or _odd(late, _where)
    if found is None and by_number and 2 * len(late) <= len(looks):
        found = late[0]
    if found is None:
        known = any(look.waiting or look.doing is Doing.OUTSIDE for look in looks)
        return _judge_alike(late, 0.0 if known else PAUSE_S)
    return _blame(found, _does(found), looks)


def _does(look: RankLook) -> str:
    does = "computes without an end" if look.busy else "makes no progress"
    return f"{does}, {_AT[look.doing]}"


def _judge_alike(looks: Sequence[RankLook], limit_s: float) -> Verdict | None:
    """Blame nobody where all do the same; they have so long for it."""
    if min(look.elapsed_s for look in looks) < limit_s:
        return None
    return Verdict(-1, f"{_names(looks)} make no progress, {_AT[looks[0].doing]}")


def _judge_waiting(looks: Sequence[RankLook]) -> Verdict:
    """Blame the rank that is in another collective than the others, or did not come to theirs."""
    for each in missed(looks):
        there = [look for look in looks if look.rank in each.missing]
        return Verdict(there[0].rank, f"{each.in_words()}; {_does(there[0])}")
    found = _astray(looks) or _least(looks, _operations) or _odd(looks, _where) or _behind(looks)
    if found is None:
        return Verdict(-1, f"{_names(looks)} wait for each other in a collective")
    return _blame(found, "waits in another collective than the others", looks)


def missed(looks: Sequence[RankLook]) -> list[Stuck]:
    """The collectives that some ranks have not joined, by what all have written down; the least
    that miss one first. None where not all have."""
    standings = {look.rank: look.standing for look in looks if look.standing is not None}
    found = stuck(standings) if len(standings) == len(looks) else []
    return sorted(found, key=lambda each: len(each.missing))


def _astray(looks: Sequence[RankLook]) -> RankLook | None:
    """The one that has begun another collective than most, at the first place where they differ."""
    begun: dict[int, dict[int, int]] = {}  # number of the collective -> place in looks -> mark
    for place, look in enumerate(looks):
        for number, mark in enumerate(look.recent, look.operations - len(look.recent)):
            begun.setdefault(number, {})[place] = mark
    differ = [marks for _, marks in sorted(begun.items()) if len(set(marks.values())) > 1]
    odd = _odd(list(differ[0].items()), lambda item: item[1]) if differ else None
    return looks[odd[0]] if odd else None


def tell(look: RankLook) -> str:
    """Say in a line what a rank was found to do."""
    does = "stopped by a signal" if look.stopped else "waits for others" if look.waiting else ""
    does = does or ("computes" if look.busy else "rests")
    told = f"rank {look.rank}: {_AT[look.doing]} for {look.elapsed_s:.0f} s, {does}"
    return f"{told}, at {look.where}" if look.where else told


def _blame(look: RankLook, does: str, looks: Sequence[RankLook]) -> Verdict:
    others = [other for other in looks if other.waiting and other is not look]
    told = f"rank {look.rank} {does}"
    if others and not look.waiting:
        told += f", and {_names(others)} wait for it"
    innermost = look.where.partition(" < ")[0]
    # Between steps a script may do what it likes, for a moment also nothing.
    seen = look.doing in (*_STEPS, Doing.OUTSIDE) and (bool(others) or look.waiting)
    why = f"{told}; it is at {innermost}" if innermost else told
    return Verdict(look.rank, why, sure=look.stopped or seen)


def _names(looks: Sequence[RankLook]) -> str:
    if len(looks) > 4:
        return f"{len(looks)} ranks"
    return ("rank " if len(looks) == 1 else "ranks ") + ", ".join(str(look.rank) for look in looks)


def _where(look: RankLook) -> str:
    return look.where


def _operations(look: RankLook) -> int:
    return look.operations


def _behind(looks: Sequence[RankLook]) -> RankLook | None:
    """The one that has finished the fewest steps, if there is one."""
    return _least(looks, lambda look: look.finished)


def _least(looks: Sequence[RankLook], number: Callable[[RankLook], int]) -> RankLook | None:
    first, *others = sorted(looks, key=number)
    return first if others and number(first) < number(others[0]) else None


def _only(looks: Sequence[RankLook], trait: Callable[[RankLook], Hashable]) -> RankLook | None:
    """The one that differs in a trait from all others; these are several, and alike."""
    counts = Counter(map(trait, looks))
    found = next((look for look in looks if counts[trait(look)] == 1), None)
    return found if len(looks) > 2 and len(counts) == 2 else None


def _odd(those: Sequence[T], trait: Callable[[T], Hashable]) -> T | None:
    """The first that differs in a trait from more than half of all, if there are such."""
    common, count = Counter(map(trait, those)).most_common(1)[0]
    if 2 * count <= len(those):
        return None
    return next((each for each in those if trait(each) != common), None)
