"""Ranks that make no progress: which rank did not join the others, and the reaction.

An agent reports that one of its ranks is late. Then all agents inspect their ranks. From their
answers the machine finds out whether the job hangs, and which rank causes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import msgspec

from rekindle.coordinator.machine.endings import Endings
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.job_state import HangInspection, JobState, Phase, SetTimer, Timer
from rekindle.coordinator.machine.recovery import Recovery
from rekindle.coordinator.machine.roster import Status
from rekindle.profiling.blocked_collectives import Stuck, stuck
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import BUSY_S, RankActivity
from rekindle.protocol.monitoring import RankInspection
from rekindle.recovery.faults.fault import FaultKind

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


def judge(looks: Sequence[RankInspection]) -> HangDiagnosis | None:
    """Return the diagnosis if these ranks hang; None: they do not, or not yet.

    A stopped rank is the cause before any other rank. Otherwise the cause is a rank that is late
    with its own activity while others wait for it. If all ranks wait, one of them is in another
    collective than the others.
    """
    stopped = [look for look in looks if look.stopped]
    absent = [look for look in looks if not look.waiting]
    late = [look for look in absent if look.late]
    outside = all(look.doing is RankActivity.OUTSIDE for look in looks)
    if not any(look.late for look in looks):
        return None  # the late ranks have made progress
    if outside and not all(look.late for look in looks):
        return None  # without a Session, the only sign is that all ranks rest
    if stopped:
        first, *more = (_blame(look, "is stopped by a signal", looks) for look in stopped)
        return msgspec.structs.replace(first, more=tuple(more))
    if absent and not late:
        return None  # these ranks have time left, and all others wait for them
    if not (outside or _waited_for(looks)):
        return _judge_unwaited(looks)
    if late:
        return _judge_absent(late, looks)
    if min(look.elapsed_s for look in looks) < MOVED_ON_S:
        return None
    return _judge_waiting(looks)


def _waited_for(looks: Sequence[RankInspection]) -> bool:
    """Return whether some ranks wait for others."""
    return any(look.waiting or look.doing is RankActivity.MEETING for look in looks)


def _judge_unwaited(looks: Sequence[RankInspection]) -> HangDiagnosis | None:
    """Judge ranks if none of them waits.

    All may need the same missing resource. They may also wait for a device, because a rank waits
    for other ranks on its device. Therefore one rank is the cause only if all others are late with
    a step, and it differs from all of them.
    """
    if not all(look.late for look in looks):
        return None
    resting = [look for look in looks if not look.busy]
    found = resting[0] if len(resting) == 1 else _only(looks, _where)
    others = [look for look in looks if look is not found] or looks
    if found is not None and all(look.doing in _STEPS for look in others):
        return _blame(found, _does(found), looks)
    return _judge_alike(looks, PAUSE_S if resting else BUSY_S)


def _judge_absent(
    late: Sequence[RankInspection], looks: Sequence[RankInspection]
) -> HangDiagnosis | None:
    """Find the cause among the late ranks that do not wait: the rank that differs."""
    by_number = _waited_for(looks) or len(looks) == 1  # the waiting ranks wait for the few others
    found = late[0] if by_number and len(late) == 1 else _behind(late) or _odd(late, _where)
    if found is None and by_number and 2 * len(late) <= len(looks):
        found = late[0]
    if found is None:
        known = any(look.waiting or look.doing is RankActivity.OUTSIDE for look in looks)
        return _judge_alike(late, 0.0 if known else PAUSE_S)
    return _blame(found, _does(found), looks)


def _does(look: RankInspection) -> str:
    does = "computes without end" if look.busy else "makes no progress"
    return f"{does}, {_AT[look.doing]}"


def _judge_alike(looks: Sequence[RankInspection], limit_s: float) -> HangDiagnosis | None:
    """Return a diagnosis without a cause if all ranks have done the same for `limit_s`."""
    if min(look.elapsed_s for look in looks) < limit_s:
        return None
    return HangDiagnosis(-1, f"{_names(looks)} make no progress, {_AT[looks[0].doing]}")


def _judge_waiting(looks: Sequence[RankInspection]) -> HangDiagnosis:
    """Find the rank that is in another collective than the others, or did not join theirs."""
    for each in missed(looks):
        there = [look for look in looks if look.rank in each.missing]
        return HangDiagnosis(there[0].rank, f"{each.in_words()}; {_does(there[0])}")
    found = _astray(looks) or _least(looks, _operations) or _odd(looks, _where) or _behind(looks)
    if found is None:
        return HangDiagnosis(-1, f"{_names(looks)} wait for each other in a collective")
    return _blame(found, "waits in another collective than the others", looks)


def missed(looks: Sequence[RankInspection]) -> list[Stuck]:
    """Return the collectives that some ranks have not joined, according to the ranks' records.

    A collective with fewer missing ranks comes first. The result is empty if a rank has no record.
    """
    standings = {look.rank: look.standing for look in looks if look.standing is not None}
    found = stuck(standings) if len(standings) == len(looks) else []
    return sorted(found, key=lambda each: len(each.missing))


def _astray(looks: Sequence[RankInspection]) -> RankInspection | None:
    """Return the rank that began another collective than most, at the first difference."""
    begun: dict[int, dict[int, int]] = {}  # number of the collective -> place in looks -> mark
    for place, look in enumerate(looks):
        for number, mark in enumerate(look.recent, look.operations - len(look.recent)):
            begun.setdefault(number, {})[place] = mark
    differ = [marks for _, marks in sorted(begun.items()) if len(set(marks.values())) > 1]
    odd = _odd(list(differ[0].items()), lambda item: item[1]) if differ else None
    return looks[odd[0]] if odd else None


def described(look: RankInspection) -> str:
    """Describe in one line the activity of an inspected rank."""
    does = "stopped by a signal" if look.stopped else "waits for others" if look.waiting else ""
    does = does or ("computes" if look.busy else "rests")
    description = f"rank {look.rank}: {_AT[look.doing]} for {look.elapsed_s:.0f} s, {does}"
    return f"{description}, at {look.where}" if look.where else description


def _blame(look: RankInspection, does: str, looks: Sequence[RankInspection]) -> HangDiagnosis:
    others = [other for other in looks if other.waiting and other is not look]
    description = f"rank {look.rank} {does}"
    if others and not look.waiting:
        description += f", and {_names(others)} wait for it"
    innermost = look.where.partition(" < ")[0]
    # Between steps a script may do anything, and may also rest for a moment.
    certain = look.doing in (*_STEPS, RankActivity.OUTSIDE) and (bool(others) or look.waiting)
    why = f"{description}; it is at {innermost}" if innermost else description
    return HangDiagnosis(look.rank, why, sure=look.stopped or certain)


def _names(looks: Sequence[RankInspection]) -> str:
    if len(looks) > 4:
        return f"{len(looks)} ranks"
    return ("rank " if len(looks) == 1 else "ranks ") + ", ".join(str(look.rank) for look in looks)


def _where(look: RankInspection) -> str:
    return look.where


def _operations(look: RankInspection) -> int:
    return look.operations


def _behind(looks: Sequence[RankInspection]) -> RankInspection | None:
    """Return the rank that has finished fewer steps than all others, or None."""
    return _least(looks, lambda look: look.finished)


def _least(
    looks: Sequence[RankInspection], number: Callable[[RankInspection], int]
) -> RankInspection | None:
    first, *others = sorted(looks, key=number)
    return first if others and number(first) < number(others[0]) else None


def _only(
    looks: Sequence[RankInspection], trait: Callable[[RankInspection], Hashable]
) -> RankInspection | None:
    """Return the rank that differs in a trait from all others, if the others are alike."""
    counts = Counter(map(trait, looks))
    found = next((look for look in looks if counts[trait(look)] == 1), None)
    return found if len(looks) > 2 and len(counts) == 2 else None


def _odd(those: Sequence[T], trait: Callable[[T], Hashable]) -> T | None:
    """Return the first item that differs in a trait from more than half of all, or None."""
    common, count = Counter(map(trait, those)).most_common(1)[0]
    if 2 * count <= len(those):
        return None
    return next((each for each in those if trait(each) != common), None)


ANSWER_S = 2.5  # limit for an inspection, if the answers that arrived show the cause

LONGEST_ANSWER_S = 10.0  # limit if they do not

AGAIN_S = 1.5  # between two inspections that must agree

MOST_DESCRIBED = 64  # ranks that the journal describes; the ranks' logs have all stacks

# Shortest and longest pause after an inspection that found no hang. The pause doubles: one agent
# rarely reports late ranks, but among a thousand agents, one always does.
SOONEST_S, SELDOM_S = 1.0, 30.0


class InspectionBackoff(msgspec.Struct, frozen=True):
    """The pause after inspections that find no hang, while the job makes no progress (`at`).

    without_progress: ranks that had made no progress at an inspection.
    """

    at: tuple[int, ...] = ()
    seconds: float = 0.0
    since: float = 0.0
    without_progress: frozenset[int] = frozenset()

    def is_over(self, at: tuple[int, ...], rank: int, now: float) -> bool:
        """Return whether to inspect because of this rank: it is newly late, or the pause ended."""
        return (
            at != self.at or rank not in self.without_progress or now >= self.since + self.seconds
        )

    def begun(self, at: tuple[int, ...], rank: int, now: float) -> InspectionBackoff:
        """Return the pause after the inspection that begins now. The first one has no pause."""
        if at != self.at:
            return InspectionBackoff(at, 0.0, now, frozenset({rank}))
        seconds = min(max(2 * self.seconds, SOONEST_S), SELDOM_S)
        return InspectionBackoff(at, seconds, now, self.without_progress | {rank})


class Hangs:
    """Asks all agents to inspect their ranks, and judges the results."""

    def __init__(self, job: JobState, fleet: Fleet, endings: Endings, recovery: Recovery) -> None:
        self._job = job
        self._fleet = fleet
        self._endings = endings
        self._recovery = recovery
        self._roster = job.roster
        self._count = 0  # of inspections
        self._pause = InspectionBackoff()  # after the newest inspection

    def on_stalled(self, message: p.RankStalled, now: float) -> None:
        """Handle a late rank. The others become late when they wait for it."""
        stale = self._job.session and message.generation != self._job.generation
        busy = self._job.looking is not None or self._job.suspect is not None
        at = self._job.generation, self._job.restarts, self._job.newest
        if busy or stale or not self._may_hang() or not self._pause.is_over(at, message.rank, now):
            return
        self._pause = self._pause.begun(at, message.rank, now)
        self.look()

    def look(self) -> None:
        """Order an inspection of all ranks."""
        self._count += 1
        members = {node.node for node in self._roster.members}
        self._job.looking = HangInspection(
            self._count, (self._job.generation, self._job.restarts), members
        )
        self._fleet.tell_nodes(p.InspectRanks(serial=self._count))
        self._job.do(SetTimer(Timer.LOOK, ANSWER_S))

    def on_looked(self, node: int, message: p.RanksInspected, now: float) -> None:
        """Handle the results of a node's inspection."""
        looking = self._job.looking
        if looking is None or looking.serial != message.serial:
            return
        looking.wanted.discard(node)
        if message.error:
            looking.blind.add(node)
        looking.looks += [look for look in message.looks if self._roster.ranks[look.rank].inside]
        if not looking.wanted:
            self.judge(now)

    def judge(self, now: float) -> None:
        """Judge the results that have arrived."""
        looking = self._job.looking
        if looking is None:
            return
        looks = sorted(looking.looks, key=lambda look: look.rank)
        unseen = looking.wanted | looking.blind
        # Otherwise only the missing results can show which rank the others wait for, or whether all
        # are alike.
        enough = not unseen or 0 < sum(look.waiting for look in looks) < len(looks)
        if not enough and looking.wanted and not looking.patient:
            looking.patient = True
            self._job.do(SetTimer(Timer.LOOK, LONGEST_ANSWER_S - ANSWER_S))
            return
        suspect = self._job.suspect
        self._job.stop_looking()
        if looking.at != (self._job.generation, self._job.restarts) or not self._may_hang():
            return
        still = self._job.spec.policy.hang_timeout_s
        without_progress = self._pause.without_progress | {
            look.rank for look in looks if look.elapsed_s >= still
        }
        self._pause = msgspec.structs.replace(self._pause, without_progress=without_progress)
        verdict = judge(looks) if enough and looks else None
        if verdict is None or (unseen and verdict.rank < 0):
            return
        blamed = next((look for look in looks if look.rank == verdict.rank), None)
        if blamed is not None and not verdict.sure and not _agree(suspect, blamed):
            if suspect is None:
                self._job.suspect = blamed
                self._job.do(SetTimer(Timer.AGAIN, AGAIN_S))
        elif all(look.waiting for look in looks) and self._roster.any_is(Status.EXITED):
            self._endings.blame_exited()
        else:
            for each in (verdict, *verdict.more):
                self._blame(each, looks, now)

    def _blame(self, verdict: HangDiagnosis, looks: Sequence[p.RankInspection], now: float) -> None:
        blamed = [look for look in looks if look.rank == verdict.rank]
        longest = max(look.elapsed_s for look in looks)
        text = f"the job hangs: {verdict.why} (no progress for {longest:.0f} s)"
        rank = self._roster.ranks[verdict.rank if blamed else looks[0].rank]
        if not rank.inside:
            return  # its node left the world because of another rank
        collectives = [each.in_words() for each in missed(looks)]
        descriptions = (
            *(look.stack for look in blamed),
            *collectives,
            *map(described, looks[:MOST_DESCRIBED]),
        )
        traceback = "\n".join(descriptions)
        fault = msgspec.structs.replace(
            self._job.fault(FaultKind.HANG, rank, text, now), traceback=traceback
        )
        if not blamed:
            fault = msgspec.structs.replace(fault, rank=-1, node=-1)
        self._recovery.report(fault)

    def _may_hang(self) -> bool:
        """Return whether no other activity with its own time limit is under way."""
        if self._job.phase is Phase.TRAINING:
            return True
        running = (Status.STARTING, Status.EXITED)
        untouched = self._job.phase is Phase.REGROUPING and not self._job.session
        return untouched and self._job.incidents.awaiting is None and self._roster.all_are(*running)


def _agree(suspect: p.RankInspection | None, blamed: p.RankInspection) -> bool:
    """Return whether the first inspection found the same rank, still in the same activity."""
    if suspect is None or suspect.rank != blamed.rank:
        return False
    return suspect.doing is blamed.doing and suspect.elapsed_s <= blamed.elapsed_s
