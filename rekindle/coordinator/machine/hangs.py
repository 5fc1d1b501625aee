"""The seventh layer of the coordinator's mind: ranks that live and make no progress.

An agent says that a rank of its is late. Then all agents look closely at their ranks, and what they
see together tells whether there is a hang, and whose fault it is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import msgspec

from rekindle.coordinator.machine.endings import STOP_GRACE_S
from rekindle.coordinator.machine.hang_diagnosis import Verdict, judge, missed, tell
from rekindle.coordinator.machine.job_state import CancelTimer, Phase, SetTimer
from rekindle.coordinator.machine.ranks import Status
from rekindle.coordinator.machine.recovery import Recovering
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Kind

ANSWER_S = 2.5  # how long agents have to look, where the others show what holds them up
LONGEST_ANSWER_S = 10.0  # and where they do not
AGAIN_S = 1.5  # between two looks that have to agree
# Between two looks that found no hang. It doubles: an agent alone says seldom that ranks are late,
# a thousand of them do so all the time.
SOONEST_S, SELDOM_S = 1.0, 30.0
MOST_TOLD = 64  # ranks that the journal says something of; the stacks of all are in their logs


class Looking:
    """One look at all ranks. at: where the job was then, which may be over when all have answered.

    wanted: nodes that have not answered. blind: those that could not look. patient: they have more
    time than usual.
    """

    def __init__(self, serial: int, at: tuple[int, int], wanted: set[int]) -> None:
        self.serial = serial
        self.at = at
        self.wanted = wanted
        self.blind: set[int] = set()
        self.looks: list[p.RankLook] = []
        self.patient = False


class Pause(msgspec.Struct, frozen=True):
    """Time between looks that find nothing, as long as the job is where it was (`at`).

    known: ranks that had made no progress when they were looked at.
    """

    at: tuple[int, ...] = ()
    seconds: float = 0.0
    since: float = 0.0
    known: frozenset[int] = frozenset()

    def is_over(self, at: tuple[int, ...], rank: int, now: float) -> bool:
        """Whether to look because of this rank; whoever was not late at the last look is news."""
        return at != self.at or rank not in self.known or now >= self.since + self.seconds

    def begun(self, at: tuple[int, ...], rank: int, now: float) -> Pause:
        """Return the pause behind the look that begins now; there is none behind the first."""
        if at != self.at:
            return Pause(at, 0.0, now, frozenset({rank}))
        seconds = min(max(2 * self.seconds, SOONEST_S), SELDOM_S)
        return Pause(at, seconds, now, self.known | {rank})


class Stalling(Recovering):
    """One look at a time."""

    _looking: Looking | None = None
    _looks = 0  # so far
    _pause = Pause()
    _suspect: p.RankLook | None = None  # to blame, if it is found so once more

    def on_stalled(self, message: p.Stalled, now: float) -> None:
        """A rank is late; the others will be when they wait for it."""
        stale = self._session and message.generation != self.generation
        busy = self._looking is not None or self._suspect is not None
        at = self.generation, self.restarts, self.newest
        if busy or stale or not self._may_hang() or not self._pause.is_over(at, message.rank, now):
            return
        self._pause = self._pause.begun(at, message.rank, now)
        self._look()

    def _look(self) -> None:
        """Have all agents look at their ranks."""
        self._looks += 1
        members = {node.node for node in self.roster.members}
        self._looking = Looking(self._looks, (self.generation, self.restarts), members)
        self._tell_nodes(p.Look(serial=self._looks))
        self._do(SetTimer("look", ANSWER_S))

    def on_looked(self, node: int, message: p.Looked, now: float) -> None:
        """A node has looked at its ranks."""
        looking = self._looking
        if looking is None or looking.serial != message.serial:
            return
        looking.wanted.discard(node)
        if message.error:
            looking.blind.add(node)
        looking.looks += [look for look in message.looks if self.roster.ranks[look.rank].inside]
        if not looking.wanted:
            self._judge(now)

    def _on_look_timer(self, name: str, now: float) -> None:
        if name == "look":
            self._judge(now)
        else:
            self._look()

    def _judge(self, now: float) -> None:
        """Decide with what was seen until now."""
        looking = self._looking
        if looking is None:
            return
        looks = sorted(looking.looks, key=lambda look: look.rank)
        unseen = looking.wanted | looking.blind
        # Else for whom others wait, or whether all are alike, tell those that were not seen.
        enough = not unseen or 0 < sum(look.waiting for look in looks) < len(looks)
        if not enough and looking.wanted and not looking.patient:
            looking.patient = True
            self._do(SetTimer("look", LONGEST_ANSWER_S - ANSWER_S))
            return
        suspect = self._suspect
        self._look_no_more()
        if looking.at != (self.generation, self.restarts) or not self._may_hang():
            return
        still = self.spec.policy.hang_timeout_s
        known = self._pause.known | {look.rank for look in looks if look.elapsed_s >= still}
        self._pause = msgspec.structs.replace(self._pause, known=known)
        verdict = judge(looks) if enough and looks else None
        if verdict is None or (unseen and verdict.rank < 0):
            return
        blamed = next((look for look in looks if look.rank == verdict.rank), None)
        if blamed is not None and not verdict.sure and not _agree(suspect, blamed):
            if suspect is None:
                self._suspect = blamed
                self._do(SetTimer("again", AGAIN_S))
        elif all(look.waiting for look in looks) and self.roster.any_is(Status.EXITED):
            self._blame_exited()
        else:
            for each in (verdict, *verdict.more):
                self._blame(each, looks, now)

    def _blame(self, verdict: Verdict, looks: Sequence[p.RankLook], now: float) -> None:
        blamed = [look for look in looks if look.rank == verdict.rank]
        longest = max(look.elapsed_s for look in looks)
        text = f"the job hangs: {verdict.why} (no progress for {longest:.0f} s)"
        rank = self.roster.ranks[verdict.rank if blamed else looks[0].rank]
        if not rank.inside:
            return  # its node was put out because of another of its ranks
        collectives = [each.in_words() for each in missed(looks)]
        told = (*(look.stack for look in blamed), *collectives, *map(tell, looks[:MOST_TOLD]))
        seen = "\n".join(told)
        fault = msgspec.structs.replace(self._fault(Kind.HANG, rank, text, now), traceback=seen)
        if not blamed:
            fault = msgspec.structs.replace(fault, rank=-1, node=-1)
        self._on_fault(fault)

    def _may_hang(self) -> bool:
        """Whether nothing else is under way that has a time limit of its own."""
        if self.phase is Phase.TRAINING:
            return True
        running = (Status.STARTING, Status.EXITED)
        untouched = self.phase is Phase.REGROUPING and not self._session
        return untouched and self._awaiting is None and self.roster.all_are(*running)

    def _look_no_more(self) -> None:
        """What was asked about ranks is answered, or does not matter any more."""
        self._looking = self._suspect = None
        self._do(CancelTimer("look"))
        self._do(CancelTimer("again"))

    def _declare_over(self) -> None:
        self._look_no_more()
        super()._declare_over()

    def _end_ranks(self, phase: Phase, reason: str, grace_s: float = STOP_GRACE_S) -> None:
        self._look_no_more()
        super()._end_ranks(phase, reason, grace_s)

    @abstractmethod
    def _blame_exited(self) -> None: ...


def _agree(suspect: p.RankLook | None, blamed: p.RankLook) -> bool:
    """Whether a rank that is to blame was so before, and is still at the same thing."""
    if suspect is None or suspect.rank != blamed.rank:
        return False
    return suspect.doing is blamed.doing and suspect.elapsed_s <= blamed.elapsed_s
