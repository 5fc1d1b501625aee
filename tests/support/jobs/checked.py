"""Simulated agents whose nodes are checked: before they join, or while their ranks wait."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from jobs.driver import Driver
from jobs.processes import Agent
from jobs.simulated import World
from rekindle.coordinator.machine.job_state import ENDING
from rekindle.profiling.steps import StepTimes
from rekindle.protocol import agent as p
from rekindle.recovery.node_check.evidence import Measurement


class Defect(enum.Enum):
    """The result of each measurement of a node."""

    NONE = "healthy"
    SLOW = "computes slowly"
    BROKEN = "a device fails"
    CUT = "collectives with other nodes fail"
    MEMORY = "the device has too little memory for the check"
    SILENT = "does not answer before it is stopped"


class Candidate:
    """An agent whose node is checked before it joins, with unread orders and unsent messages.

    node, agent: its node rank, and its state as a node; -1 and None for a spare.
    """

    def __init__(self, node: int, agent: Agent | None) -> None:
        self.node = node
        self.agent = agent
        self.orders: deque[p.Message] = deque()
        self.news: deque[p.Message] = deque()


class CheckedWorld(World):
    """A job of simulated processes that answers node checks.

    `defect`: returns the defect of the node of a new connection. `candidates`: the agents whose
    nodes are checked before they join, by connection; without `network_check` there are none.
    `fair`: whether a timer that is always set again lets longer ones expire, too.
    """

    def __init__(
        self,
        *,
        defect: Callable[[], Defect] = lambda: Defect.NONE,
        fair: bool = False,
        **settings: Any,
    ) -> None:
        self.candidates: dict[int, Candidate] = {}
        self._fair = fair
        self._given: Counter[str] = Counter()  # the results of next_timer
        self._defect = defect
        self._defects: dict[int, Defect] = {}
        super().__init__(**settings)

    # ---- agents that are not admitted yet

    def absent_nodes(self) -> list[int]:
        candidates = {each.node for each in self.candidates.values()}
        return [node for node in super().absent_nodes() if node not in candidates]

    def hello_again(self, connection: int, node: int, **changes: object) -> None:
        job = self.machine.job
        if job.spec.network_check and not job.roster.knows(connection):
            self.candidates[connection] = Candidate(node, self.agents.pop(node, None))
        super().hello_again(connection, node, **changes)

    def collect(self) -> None:
        self._note_verdicts()
        super().collect()

    def _note_verdicts(self) -> None:
        """Move the candidates that were admitted or refused."""
        roster = self.machine.job.roster
        for connection, candidate in list(self.candidates.items()):
            if self.machine.admission.check.knows(connection):
                continue
            del self.candidates[connection]
            node = roster.by_connection(connection)
            if node is not None:
                assert candidate.agent is not None
                assert node.node == candidate.node
                candidate.agent.news.extend(candidate.news)
                self.nodes[node.node], self.agents[node.node] = connection, candidate.agent
            elif not roster.knows(connection):  # refused
                self.spares.discard(connection)
                if candidate.agent is not None and self.phase in ENDING:
                    self.agents[candidate.node] = candidate.agent  # no other agent comes

    def deliver_to(self, connection: int, message: p.Message) -> None:
        if connection in self.candidates:
            self.candidates[connection].orders.append(message)
        else:
            super().deliver_to(connection, message)

    def say_before_admission(self, connection: int, message: p.Message) -> None:
        """Deliver a message of an agent whose node is being checked."""
        self.now += 0.001
        self.machine.on_message(connection, message, self.now)
        self.collect()

    def lose_candidate(self, connection: int) -> None:
        """Cut the connection to an agent whose node is being checked."""
        del self.candidates[connection]
        self.spares.discard(connection)
        self.lose_spare(connection)

    def lose_coordinator(self) -> None:
        self.candidates.clear()  # their agents connect again, as new ones
        super().lose_coordinator()

    # ---- answers

    def check_moves(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for line, each in self.candidates.items():
            found += [lambda c=line: self._handle_check(c)] if each.orders else []
            found += [lambda c=line: self._hear_check(c)] if each.news else []
        return found

    def next_timer(self) -> str:
        if not self._fair:
            return super().next_timer()
        name = min(self.timers, key=lambda name: (self._given[name], self.timers[name]))
        self._given[name] += 1
        return name

    def _handle_check(self, connection: int) -> None:
        candidate = self.candidates[connection]
        candidate.news.extend(self._answers(connection, candidate.orders.popleft()))

    def _hear_check(self, connection: int) -> None:
        self.say_before_admission(connection, self.candidates[connection].news.popleft())

    def handle(self, node: int) -> None:
        agent = self.agents[node]
        if isinstance(agent.orders[0], p.CheckOrder):
            connection = self.nodes.get(node, -1)
            agent.news.extend(self._answers(connection, agent.orders.popleft()))
        else:
            super().handle(node)

    def _answers(self, connection: int, order: p.Message) -> Iterable[p.Message]:
        """Return the answers to an order of a node check."""
        if connection not in self._defects:
            self._defects[connection] = self._defect()
        defect = self._defects[connection]
        match order:
            case p.CheckStop(serial=serial) if defect is Defect.SILENT:
                return [p.Checked(serial=serial, error="its process ended")]
            case p.CheckAlone(serial=serial) if defect is not Defect.SILENT:
                return [p.CheckReady(port=20_000 + connection), _alone(serial, defect)]
            case p.CheckPair(serial=serial) if defect is not Defect.SILENT:
                cut = "connection reset" if defect is Defect.CUT else ""
                seconds = {} if cut else {Measurement.LINK: 1.0}
                return [p.Checked(serial=serial, seconds=seconds, error=cut)]
        return []


def _alone(serial: int, defect: Defect) -> p.Checked:
    match defect:
        case Defect.BROKEN:
            return p.Checked(serial=serial, error="its process ended", device=0)
        case Defect.MEMORY:
            return p.Checked(serial=serial, error="out of memory")
    work = 1.5 if defect is Defect.SLOW else 1.0
    return p.Checked(serial=serial, seconds={Measurement.COMPUTE: work, Measurement.MEMORY: 1.0})


def timings(job: Driver, node: int, steps: Iterable[int], work: float) -> p.StepTimings:
    """Return the report of a node about steps that take `work` seconds in each rank."""
    ranks = [rank for rank in job.ranks if job.node_of(rank) == node]
    return p.StepTimings(
        steps={rank: tuple(_times(rank, step, work) for step in steps) for rank in ranks}
    )


def _times(rank: int, step: int, work: float) -> StepTimes:
    # Clocks and computers are never quite equal.
    own = work * (1 + 0.002 * ((step * 7 + rank * 3) % 5))
    return StepTimes(step=step, start=step, seconds=0.1, own=own)
