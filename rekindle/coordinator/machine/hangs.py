"""Ranks that live and make no progress.

An agent says that a rank of its is late. Then all agents look closely at their ranks. From
their answers the machine finds out whether there is a hang, and which rank causes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rekindle.coordinator.machine.endings import Endings
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.hang_diagnosis import Verdict, judge, missed, tell
from rekindle.coordinator.machine.job_state import JobState, Phase, SetTimer, Timer
from rekindle.coordinator.machine.looks import Looking, Looks
from rekindle.coordinator.machine.ranks import Status
from rekindle.coordinator.machine.recovery import Recovery
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Kind

ANSWER_S = 2.5  # how long agents have to look, where the others show what holds them up

LONGEST_ANSWER_S = 10.0  # and where they do not

AGAIN_S = 1.5  # between two looks that have to agree

MOST_TOLD = 64  # ranks that the journal says something of; the stacks of all are in their logs


class Hangs:
    """Asks all agents to look at their ranks, and judges what they see."""

    def __init__(
        self, job: JobState, fleet: Fleet, looks: Looks, endings: Endings, recovery: Recovery
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._looks = looks
        self._endings = endings
        self._recovery = recovery
        self._roster = job.roster
        self._spec = job.spec
        self._incidents = job.incidents

    def on_stalled(self, message: p.Stalled, now: float) -> None:
        """A rank is late; the others will be when they wait for it."""
        stale = self._job.session and message.generation != self._job.generation
        busy = self._looks.looking is not None or self._looks.suspect is not None
        at = self._job.generation, self._job.restarts, self._job.newest
        if (
            busy
            or stale
            or not self._may_hang()
            or not self._looks.pause.is_over(at, message.rank, now)
        ):
            return
        self._looks.pause = self._looks.pause.begun(at, message.rank, now)
        self.look()

    def look(self) -> None:
        """Have all agents look at their ranks."""
        self._looks.count += 1
        members = {node.node for node in self._roster.members}
        self._looks.looking = Looking(
            self._looks.count, (self._job.generation, self._job.restarts), members
        )
        self._fleet.tell_nodes(p.Look(serial=self._looks.count))
        self._job.do(SetTimer(Timer.LOOK, ANSWER_S))

    def on_looked(self, node: int, message: p.Looked, now: float) -> None:
        """A node has looked at its ranks."""
        looking = self._looks.looking
        if looking is None or looking.serial != message.serial:
            return
        looking.wanted.discard(node)
        if message.error:
            looking.blind.add(node)
        looking.looks += [look for look in message.looks if self._roster.ranks[look.rank].inside]
        if not looking.wanted:
            self.judge(now)

    def judge(self, now: float) -> None:
        """Decide with what was seen until now."""
        looking = self._looks.looking
        if looking is None:
            return
        looks = sorted(looking.looks, key=lambda look: look.rank)
        unseen = looking.wanted | looking.blind
        # Else for whom others wait, or whether all are alike, tell those that were not seen.
        enough = not unseen or 0 < sum(look.waiting for look in looks) < len(looks)
        if not enough and looking.wanted and not looking.patient:
            looking.patient = True
            self._job.do(SetTimer(Timer.LOOK, LONGEST_ANSWER_S - ANSWER_S))
            return
        suspect = self._looks.suspect
        self._looks.stop()
        if looking.at != (self._job.generation, self._job.restarts) or not self._may_hang():
            return
        still = self._spec.policy.hang_timeout_s
        known = self._looks.pause.known | {look.rank for look in looks if look.elapsed_s >= still}
        self._looks.pause = msgspec.structs.replace(self._looks.pause, known=known)
        verdict = judge(looks) if enough and looks else None
        if verdict is None or (unseen and verdict.rank < 0):
            return
        blamed = next((look for look in looks if look.rank == verdict.rank), None)
        if blamed is not None and not verdict.sure and not _agree(suspect, blamed):
            if suspect is None:
                self._looks.suspect = blamed
                self._job.do(SetTimer(Timer.AGAIN, AGAIN_S))
        elif all(look.waiting for look in looks) and self._roster.any_is(Status.EXITED):
            self._endings.blame_exited()
        else:
            for each in (verdict, *verdict.more):
                self._blame(each, looks, now)

    def _blame(self, verdict: Verdict, looks: Sequence[p.RankLook], now: float) -> None:
        blamed = [look for look in looks if look.rank == verdict.rank]
        longest = max(look.elapsed_s for look in looks)
        text = f"the job hangs: {verdict.why} (no progress for {longest:.0f} s)"
        rank = self._roster.ranks[verdict.rank if blamed else looks[0].rank]
        if not rank.inside:
            return  # its node was put out because of another of its ranks
        collectives = [each.in_words() for each in missed(looks)]
        told = (*(look.stack for look in blamed), *collectives, *map(tell, looks[:MOST_TOLD]))
        seen = "\n".join(told)
        fault = msgspec.structs.replace(self._job.fault(Kind.HANG, rank, text, now), traceback=seen)
        if not blamed:
            fault = msgspec.structs.replace(fault, rank=-1, node=-1)
        self._recovery.report(fault)

    def _may_hang(self) -> bool:
        """Whether nothing else is under way that has a time limit of its own."""
        if self._job.phase is Phase.TRAINING:
            return True
        running = (Status.STARTING, Status.EXITED)
        untouched = self._job.phase is Phase.REGROUPING and not self._job.session
        return untouched and self._incidents.awaiting is None and self._roster.all_are(*running)


def _agree(suspect: p.RankLook | None, blamed: p.RankLook) -> bool:
    """Whether a rank that is to blame was so before, and is still at the same thing."""
    if suspect is None or suspect.rank != blamed.rank:
        return False
    return suspect.doing is blamed.doing and suspect.elapsed_s <= blamed.elapsed_s
