"""The check of a group of nodes: what agents measure, alone and in pairs, and in which order.

Agents of one host measure one after another, because they would slow each other down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from rekindle.coordinator.machine.job_state import CancelTimer, Send, SetTimer, Timer
from rekindle.job.spec import JobSpec
from rekindle.names import SPARE
from rekindle.protocol.agent import Message
from rekindle.protocol.node_check import (
    CheckAlone,
    Checked,
    CheckOver,
    CheckPair,
    CheckReady,
    CheckStop,
)
from rekindle.recovery.node_check.evidence import (
    Alone,
    Edge,
    Evidence,
    Measurement,
    NodeCheckLimits,
    Pair,
    lacks_memory,
)
from rekindle.recovery.node_check.rounds import next_round
from rekindle.recovery.node_check.verdicts import SICK, NodeVerdict, verdicts

# Agents that arrive within this time are checked together, if some awaited agents are missing. A
# single node cannot be compared with others.
GATHER_S = 20.0
_GONE = "the job lost its agent"


class CheckedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent whose node is checked. node: its node rank; SPARE: it has none."""

    connection: int
    node: int
    host: str
    address: str


class NodeJudged(msgspec.Struct, frozen=True):
    """The verdict about an agent's node."""

    connection: int
    verdict: NodeVerdict


class _Candidate:
    """An agent that waits or is being checked. number: identifies its node during that time."""

    def __init__(self, agent: CheckedAgent, number: int) -> None:
        self.agent, self.connection, self.number = agent, agent.connection, number
        self.port = 0
        self.gone = False
        # Pods of one host have different addresses. Simulated hosts have the address of their
        # machine.
        self.machine = {agent.host or agent.address, agent.address}


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an agent, or the error that stands for a missing answer. As in Checked."""

    seconds: dict[Measurement, float] = {}
    note: str = ""
    error: str = ""
    device: int = -1


class _Item(msgspec.Struct):
    """A measurement that is under way, of one node or of two."""

    serial: int
    candidates: tuple[_Candidate, ...]
    answers: dict[int, _Answer]  # by number


class NodeCheckRun:
    """Checks all waiting agents together, then the agents that arrived during the check.

    awaited: number of agents before the check begins. do: takes commands. beside_ranks: whether
    ranks of the agents live, and wait. judged: the verdicts since the last take_judged().
    """

    def __init__(
        self,
        spec: JobSpec,
        awaited: int,
        do: Callable[[Send | SetTimer | CancelTimer], None],
        *,
        beside_ranks: bool = False,
    ) -> None:
        self.judged: list[NodeJudged] = []
        self._do = do
        self._limits: NodeCheckLimits = spec.node_check
        self._beside_ranks = beside_ranks
        self._awaited = awaited
        self._limit_timer, self._begin_timer = Timer.CHECK, Timer.CHECK_BEGINS
        if beside_ranks:
            self._limit_timer, self._begin_timer = Timer.EXAMINATION, Timer.EXAMINATION_BEGINS
        self._waiting: list[_Candidate] = []  # not being checked yet
        self._candidates: dict[int, _Candidate] = {}  # being checked, by number
        self._evidence: Evidence | None = None
        self._unmeasured: list[tuple[_Candidate, ...]] = []
        self._items: dict[int, _Item] = {}  # under way, by serial
        self._serial = 0
        self._numbers = 0

    @property
    def is_busy(self) -> bool:
        """Return whether any agent waits or is being checked. The job may await its node."""
        return bool(self._candidates or self._waiting)

    def take_judged(self) -> list[NodeJudged]:
        """Return the verdicts since the last call."""
        judged, self.judged = self.judged, []
        return judged

    # ---- agents

    def add(self, agent: CheckedAgent) -> None:
        """Check the node of this agent, too."""
        self._waiting.append(_Candidate(agent, self._numbers))
        self._numbers += 1
        if self._evidence is not None:
            return  # the next check includes it
        if len(self._waiting) >= self._awaited:
            self._begin()
        else:
            self._do(SetTimer(self._begin_timer, GATHER_S))

    def knows(self, connection: int) -> bool:
        """Return whether the agent of this connection waits or is being checked."""
        return self._candidate(connection) is not None

    def on_lost(self, connection: int) -> bool:
        """Handle a lost connection. Return False if its agent is not part of the check."""
        candidate = self._candidate(connection)
        if candidate is None:
            return False
        candidate.gone = True
        if candidate in self._waiting:
            self._waiting.remove(candidate)
            return True
        for item in [item for item in self._items.values() if candidate in item.candidates]:
            self._answer(item, candidate, _Answer(error=_GONE))
        self._go_on()
        return True

    def on_gathering_over(self) -> None:
        """Handle the time limit for further agents: begin the check."""
        if self._evidence is None and self._waiting:
            self._begin()

    def on_answers_late(self) -> None:
        """Handle the time limit for answers: record the missing answers as errors."""
        limit_s = self._limits.timeout_s
        late = f"it did not answer within {limit_s:g} s"
        for item in list(self._items.values()):
            for candidate in item.candidates:
                if candidate.number not in item.answers:
                    self._do(Send(candidate.connection, CheckStop(serial=item.serial)))
                    self._answer(item, candidate, _Answer(error=late))
        self._go_on()

    def on_message(self, connection: int, message: Message) -> None:
        """Handle a message of an agent during its check. Late answers have no effect."""
        candidate = self._candidate(connection)
        assert candidate is not None
        if isinstance(message, CheckReady):
            candidate.port = message.port
        elif isinstance(message, Checked) and message.serial in self._items:
            item = self._items[message.serial]
            if candidate in item.candidates:
                answer = _Answer(
                    seconds=message.seconds,
                    note=message.note,
                    error=message.error,
                    device=message.device,
                )
                self._answer(item, candidate, answer)
                self._go_on()

    def _candidate(self, connection: int) -> _Candidate | None:
        here = (*self._candidates.values(), *self._waiting)
        ours = (
            candidate
            for candidate in here
            if candidate.connection == connection and not candidate.gone
        )
        return next(ours, None)

    # ---- checking

    def _begin(self) -> None:
        self._do(CancelTimer(self._begin_timer))
        self._candidates = {candidate.number: candidate for candidate in self._waiting}
        self._waiting = []
        self._evidence = Evidence(self._candidates, beside_ranks=self._beside_ranks)
        self._awaited = 1  # later agents are checked as soon as possible
        self._go_on()

    def _go_on(self) -> None:
        """Order the measurements that are possible now. Judge the nodes after the last one."""
        while self._evidence is not None:
            self._give_out()
            if self._items or self._unmeasured:
                return
            self._do(CancelTimer(self._limit_timer))
            planned = next_round(self._evidence, self._limits)
            if planned is None:
                self._judge(self._evidence)
                return
            edges: Iterable[Edge | tuple[int]] = planned.pairs or ((n,) for n in planned.alone)
            self._unmeasured = [
                tuple(self._candidates[number] for number in edge) for edge in edges
            ]

    def _give_out(self) -> None:
        under_way = (candidate for item in self._items.values() for candidate in item.candidates)
        busy = {where for candidate in under_way for where in candidate.machine}
        for candidates in list(self._unmeasured):
            machines = {where for candidate in candidates for where in candidate.machine}
            if machines & busy:
                continue
            self._unmeasured.remove(candidates)
            self._serial += 1
            item = self._items[self._serial] = _Item(self._serial, candidates, {})
            lost = [candidate for candidate in candidates if candidate.gone]
            if lost:
                for candidate in candidates:
                    item.answers[candidate.number] = _Answer(error=_GONE)
                self._finish(item)
                continue
            busy |= machines
            self._order(item)
            self._do(SetTimer(self._limit_timer, self._limits.timeout_s))

    def _order(self, item: _Item) -> None:
        first, *others = item.candidates
        if not others:
            alone = CheckAlone(serial=item.serial, beside_ranks=self._beside_ranks)
            self._do(Send(first.connection, alone))
            return
        for place, candidate in enumerate(item.candidates):
            order = CheckPair(
                serial=item.serial,
                beside_ranks=self._beside_ranks,
                host=first.agent.address,
                port=first.port,
                place=place,
            )
            self._do(Send(candidate.connection, order))

    def _answer(self, item: _Item, candidate: _Candidate, answer: _Answer) -> None:
        item.answers[candidate.number] = answer
        if answer.error:  # stop the others, which may wait for this agent
            for other in item.candidates:
                if other.number not in item.answers:
                    self._do(Send(other.connection, CheckStop(serial=item.serial)))
        if len(item.answers) == len(item.candidates):
            self._finish(item)

    def _finish(self, item: _Item) -> None:
        assert self._evidence is not None
        del self._items[item.serial]
        # If an agent runs out of memory, its partner also fails, and may answer first.
        failures = (each.error for each in item.answers.values() if each.error)
        errors = sorted(failures, key=lambda error: not lacks_memory(error))
        if len(item.candidates) == 1:
            (answer,) = item.answers.values()
            alone = Alone(
                error=answer.error, device=answer.device, seconds=answer.seconds, note=answer.note
            )
            self._evidence.add(alone, item.candidates[0].number)
            return
        seconds = [each for answer in item.answers.values() for each in answer.seconds.values()]
        edge = (item.candidates[0].number, item.candidates[1].number)
        error = errors[0] if errors else ""
        self._evidence.add(Pair(nodes=edge, seconds=max(seconds, default=0.0), error=error))

    def _judge(self, evidence: Evidence) -> None:
        candidates, self._candidates, self._evidence = self._candidates, {}, None
        names = {number: _name(candidate.agent) for number, candidate in candidates.items()}
        judged = verdicts(evidence, self._limits, names)
        # Unhealthy nodes come last, because their replacements may be among the others.
        for verdict in sorted(judged, key=lambda each: each.health in SICK):
            candidate = candidates[verdict.node]
            if not candidate.gone:
                self._do(Send(candidate.connection, CheckOver()))
                self.judged.append(NodeJudged(candidate.connection, verdict))
        if self._waiting:
            self._begin()


def _name(agent: CheckedAgent) -> str:
    """Return the node's name for users: its host, and its node rank if it has one."""
    which = f"node {agent.node}" if agent.node != SPARE else "a node"
    return f"{which} on {agent.host}" if agent.host else which
