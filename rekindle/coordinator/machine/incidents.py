"""The open incident, the decisions that were made, and the decisions that wait."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle.recovery.faults.classification import explained, explains
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.decide import Decision
from rekindle.recovery.policy.history import Past, Situation, besides
from rekindle.recovery.policy.policy import LADDER, Strategy


class ExplainedFault(msgspec.Struct, frozen=True):
    """A fault that a health event explains.

    before: the fault without the explanation. strategy: the earlier decision about it.
    """

    event: journal.FaultSeen
    before: Fault
    strategy: Strategy | None = None  # None: not decided yet


class Incidents:
    """The open incident and the job's history of decisions.

    awaiting: the decision that a user must approve. held: faults that occurred while it waits.
    doubted: faults without a decision, because a health event may explain them.
    """

    def __init__(self, number: int, past: Iterable[Past] = ()) -> None:
        self.number = number  # the newest incident's
        self.open = 0  # number of the open one, or 0
        self.faults: list[Fault] = []
        self.past = list(past)
        self.awaiting: tuple[Fault, Decision] | None = None
        self.held: list[Fault] = []
        self.doubted: tuple[Fault, ...] = ()
        self._heaviest = LADDER[0]
        self._answered = 0  # faults of the open incident when `answered` was called

    @property
    def undecided(self) -> bool:
        """Return whether a decision waits for a user, or for a health event."""
        return self.awaiting is not None or bool(self.doubted)

    def waits(self, kind: FaultKind, rank: int) -> bool:
        """Return whether a fault of this kind and rank has no decision yet, or no approval."""
        waiting = [*self.held, *self.doubted]
        if self.awaiting is not None:
            waiting.append(self.awaiting[0])
        return any((fault.kind, fault.rank) == (kind, rank) for fault in waiting)

    @property
    def strategy(self) -> Strategy | None:
        """Return the heaviest strategy of the open incident; None: nothing is decided yet."""
        chosen = [past.strategy for past in self.past if past.incident == self.open]
        return max(chosen, key=[*Strategy].index, default=None)

    @property
    def unanswered(self) -> list[Fault]:
        """Return the open incident's faults since the newest generation or restart."""
        return self.faults[self._answered :]

    def answered(self) -> None:
        """Note that a generation was formed, or all ranks restart: later faults are unanswered."""
        self._answered = len(self.faults)

    def inherit(self, open_: journal.Incident) -> None:
        """Continue the incident of a coordinator that ended."""
        self.open, self.faults = open_.number, list(open_.faults)
        self._heaviest = open_.strategy or LADDER[0]

    def note(self, fault: Fault) -> journal.FaultSeen:
        """Add a fault to the open incident, or open one with it."""
        if not self.open:
            self.number += 1
            self.open = self.number
        self.faults.append(fault)
        return journal.FaultSeen(incident=self.open, fault=fault)

    def note_storage(self, fault: Fault) -> journal.Event:
        """Create a separate incident for a fault that does not disturb training."""
        return journal.CheckpointFailed(incident=self.aside(), fault=fault)

    def aside(self) -> int:
        """Return the number of an incident that closes immediately: nothing was training."""
        self.number += 1
        return self.number

    def decided(self, situation: Situation, decision: Decision) -> journal.Decided:
        """Note a decision. Return its event.

        The journal gets every decision, because each one counts against the budgets.
        """
        self.past = besides(self.past, situation.fault)
        self.past.append(
            Past(
                fault=situation.fault,
                strategy=decision.strategy,
                newest=situation.newest,
                incident=self.open,
                resumed=situation.resumed,
                rolled_back=decision.roll_back,
                apart=decision.apart,
            )
        )
        ladder = list(Strategy)
        # Decisions about lost nodes, and decisions that a user must approve, never count as
        # lighter.
        shown = decision.approval or decision.strategy in (Strategy.RECOVER, Strategy.SHRINK)
        outweighed = ladder.index(decision.strategy) < ladder.index(self._heaviest) and not shown
        if not outweighed:
            self._heaviest = decision.strategy
        return journal.Decided(
            incident=self.open,
            strategy=decision.strategy,
            reason=decision.reason,
            fault=situation.fault,
            outweighed=outweighed,
            newest=situation.newest,
            resumed=situation.resumed,
            roll_back=decision.roll_back,
            isolate=decision.isolate,
            approval=decision.approval,
            apart=decision.apart,
        )

    def explain(self, cause: Fault, within_s: float) -> ExplainedFault | None:
        """Add the code of a health event to the earlier fault that it explains, or return None."""
        decided = [(past.fault, past.incident, past.strategy) for past in self.past]
        undecided = [(f, self.open, None) for f in self.faults if f not in [d[0] for d in decided]]
        for before, incident, strategy in reversed([*decided, *undecided]):
            if cause.at - before.at > within_s or not explains(cause, before):
                continue
            fault = explained(before, cause)
            self.past = [
                msgspec.structs.replace(past, fault=fault) if past.fault == before else past
                for past in self.past
            ]
            self.faults = [fault if each == before else each for each in self.faults]
            return ExplainedFault(
                journal.FaultSeen(incident=incident, fault=fault, explained=True), before, strategy
            )
        return None

    def host_lost_with(self, node: int) -> str | None:
        """Return the host with which this node was lost last; None: the node was never lost."""
        faults = [*(past.fault for past in self.past), *self.faults]
        lost = (f.host for f in reversed(faults) if f.node == node and f.rank < 0)
        return next(lost, None)

    def close(self) -> None:
        """Close the incident, because training continues."""
        self.open = 0
        self.faults = []
        self._answered = 0
        self._heaviest = LADDER[0]
