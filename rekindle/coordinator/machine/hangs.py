"""Ranks that make no progress: the inspection of all ranks, and the reaction.

An agent reports that one of its ranks is late. Then all agents inspect their ranks. From their
answers `hang_diagnosis.py` finds out whether the job hangs, and which rank causes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rekindle.coordinator.machine.endings import Endings
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.hang_diagnosis import (
    HangDiagnosis,
    described,
    hang_place,
    hangs_here,
    judge,
    missed,
    with_patience,
)
from rekindle.coordinator.machine.job_state import HangInspection, JobState, Phase, SetTimer, Timer
from rekindle.coordinator.machine.recovery import Recovery
from rekindle.coordinator.machine.roster import Rank, Status
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind

ANSWER_S = 2.5  # limit for an inspection, if the answers that arrived show the cause
LONGEST_ANSWER_S = 10.0  # limit if they do not
AGAIN_S = 1.5  # between two inspections that must agree
MOST_DESCRIBED = 64  # ranks that the journal describes; the ranks' logs have all stacks
# Shortest and longest pause after an inspection that found no hang. The pause doubles: one agent
# rarely reports late ranks, but among a thousand agents, one always does.
SOONEST_S, SELDOM_S = 1.0, 30.0
_ALIVE = (Status.STARTING, Status.WAITING, Status.RESTORING, Status.LEAVING)


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
        self._pause = InspectionBackoff()  # after the newest inspection

    def on_stalled(self, node: int, message: p.RankStalled, now: float) -> None:
        """Handle a late rank. The others become late when they wait for it."""
        if message.stopped:
            self._on_stopped(self._roster.ranks[message.rank], now)
            return
        stale = self._job.session and message.generation != self._job.generation
        busy = self._job.inspection is not None or self._job.suspect is not None
        at = self._job.generation, self._job.restarts, self._job.newest
        if busy or stale or not self._may_hang() or not self._pause.is_over(at, message.rank, now):
            return
        self._pause = self._pause.begun(at, message.rank, now)
        self.inspect(now)

    def _on_stopped(self, rank: Rank, now: float) -> None:
        """Report a stopped rank before and between generations, where no inspection finds it.

        The ranks of a script without a Session may be stopped on purpose, also for a long time.
        The agent reports the rank again and again. A fault that waits for a decision is enough.
        """
        if self._job.incidents.waits(FaultKind.HANG, rank.rank):
            return
        between = self._job.phase in (Phase.REGROUPING, Phase.RESTORING)
        if between and self._job.has_session and rank.inside and rank.status in _ALIVE:
            text = f"the job hangs: rank {rank.rank} is stopped by a signal"
            self._recovery.report(self._job.fault(FaultKind.HANG, rank, text, now))

    def inspect(self, now: float) -> None:
        """Order an inspection of all ranks."""
        serial = self._job.next_serial()
        members = {node.node for node in self._roster.members}
        self._job.inspection = HangInspection(
            serial, (self._job.generation, self._job.restarts), members
        )
        self._fleet.tell_nodes(p.InspectRanks(serial=serial))
        self._job.do(SetTimer(Timer.LOOK, ANSWER_S))

    def on_inspected(self, node: int, message: p.RanksInspected, now: float) -> None:
        """Handle the results of a node's inspection."""
        inspection = self._job.inspection
        if inspection is None or inspection.serial != message.serial:
            return
        inspection.wanted.discard(node)
        if message.error:
            inspection.blind.add(node)
        inspection.results += [
            result for result in message.looks if self._roster.ranks[result.rank].inside
        ]
        if not inspection.wanted:
            self.judge(now)

    def judge(self, now: float) -> None:
        """Judge the results that have arrived."""
        inspection = self._job.inspection
        if inspection is None:
            return
        results = sorted(inspection.results, key=lambda result: result.rank)
        unseen = inspection.wanted | inspection.blind
        # Otherwise only the missing results can show which rank the others wait for, or whether all
        # are alike.
        enough = not unseen or 0 < sum(result.waiting for result in results) < len(results)
        if not enough and inspection.wanted and not inspection.patient:
            inspection.patient = True
            self._job.do(SetTimer(Timer.LOOK, LONGEST_ANSWER_S - ANSWER_S))
            return
        suspect = self._job.suspect
        self._job.stop_inspection()
        if inspection.at != (self._job.generation, self._job.restarts) or not self._may_hang():
            return
        still = self._job.spec.policy.hang_timeout_s
        without_progress = self._pause.without_progress | {
            result.rank for result in results if result.elapsed_s >= still
        }
        self._pause = msgspec.structs.replace(self._pause, without_progress=without_progress)
        patient = [self._with_patience(result) for result in results]
        verdict = judge(patient) if enough and results else None
        if verdict is None or (unseen and verdict.rank < 0):
            self._look_again(results, patient)
            return
        blamed = next((result for result in results if result.rank == verdict.rank), None)
        if blamed is not None and not verdict.sure and not _agree(suspect, blamed):
            if suspect is None:
                self._job.suspect = blamed
                self._job.do(SetTimer(Timer.AGAIN, AGAIN_S))
        elif all(result.waiting for result in results) and self._roster.any_is(Status.EXITED):
            self._endings.blame_exited()
        else:
            for each in (verdict, *verdict.more):
                self._blame(each, results, now)

    def _with_patience(self, result: p.RankInspection) -> p.RankInspection:
        return with_patience(self._job.incidents.past, result, self._job.newest)

    def _look_again(
        self, results: Sequence[p.RankInspection], patient: Sequence[p.RankInspection]
    ) -> None:
        """Inspect again when the first rank that is late has used up the time that it has more."""
        left_s = [
            now.limit_s - now.elapsed_s
            for now, before in zip(patient, results, strict=True)
            if before.late and not now.late
        ]
        if left_s:
            self._job.do(SetTimer(Timer.AGAIN, min(left_s)))

    def _blame(
        self, verdict: HangDiagnosis, results: Sequence[p.RankInspection], now: float
    ) -> None:
        blamed = [result for result in results if result.rank == verdict.rank]
        longest = max(result.elapsed_s for result in results)
        at = (blamed or results)[0]
        text = f"the job hangs: {verdict.why} (no progress for {longest:.0f} s)"
        if before := hangs_here(self._job.incidents.past, at, self._job.newest):
            text += f"; earlier hangs at the same place: {before}"
        rank = self._roster.ranks[at.rank]
        if not rank.inside:
            return  # its node left the world because of another rank
        collectives = [each.in_words() for each in missed(results)]
        descriptions = (
            *(result.stack for result in blamed),
            *collectives,
            *map(described, results[:MOST_DESCRIBED]),
        )
        traceback = "\n".join(descriptions)
        fault = msgspec.structs.replace(
            self._job.fault(FaultKind.HANG, rank, text, now),
            signature=hang_place(at),
            traceback=traceback,
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
