"""The fifth layer of the coordinator's mind: what is decided about a fault, and carrying it out."""

from __future__ import annotations

import msgspec

from rekindle.recovery import journal
from rekindle.recovery.case import Case
from rekindle.recovery.fault import Fault, Kind
from rekindle.recovery.history import heals
from rekindle.recovery.ladder import Decision
from rekindle.recovery.policy import ANEW, Strategy
from rekindle.recovery.suspicion import is_clean
from rekindle.runtime import protocol as p
from rekindle.runtime.elastic import Elastic
from rekindle.runtime.ending import GONE
from rekindle.runtime.roster import Status
from rekindle.runtime.state import ENDING, RESCHEDULED, CancelTimer, Phase, SetTimer


class Recovering(Elastic):
    """One decision at a time: while one waits for a person, nothing else is decided."""

    def _decide(self, fault: Fault) -> None:
        if self._awaiting is not None:
            self._held_faults.append(fault)
            return
        decision, events = self.incidents.decide(self._case(fault))
        for event in events:
            self._record(event)
        if decision.approval:
            self._awaiting = fault, decision
            self._do(SetTimer("approval", self.spec.policy.approval_timeout_s))
        else:
            self._carry_out(fault, decision)

    def _case(self, fault: Fault) -> Case:
        return Case(
            fault=fault,
            session=self._session,
            formed=self._formed,
            newest=self.newest,
            resumed=self._resumed,
            older=self._older_checkpoint() is not None,
            dead=fault.rank >= 0 and not self.roster.ranks[fault.rank].pid,
            spares=len(self.roster.free_spares),
            left=self.roster.may_be_left_out(),
            engine=self.spec.engine,
            last_words=self._step_of_last_words(),
            incident=self.incidents.open,
            past=tuple(self.incidents.past),
        )

    def approve(self, answer: p.Approval) -> str:
        """A person has answered; return why that means nothing, if it does not."""
        if self._awaiting is None or self.phase in ENDING:
            return "nothing waits for approval"
        if answer.incident != self.incidents.open:
            return f"it is incident {self.incidents.open} that waits, not {answer.incident}"
        self._on_answer(answer.granted, answer.by)
        return ""

    def _on_answer(self, granted: bool, by: str) -> None:
        assert self._awaiting is not None
        fault, decision = self._awaiting
        held, self._held_faults, self._awaiting = self._held_faults, [], None
        self._do(CancelTimer("approval"))
        self._record(
            journal.Answered(
                incident=self.incidents.open, strategy=decision.strategy, granted=granted, by=by
            )
        )
        if not granted:
            reason = f"{fault.message}; {decision.strategy.value} was not approved by {by}"
            decision = Decision(strategy=Strategy.FAIL, reason=reason)
        self._carry_out(fault, decision)
        for other in held:
            if self.phase not in (Phase.RESTARTING, *ENDING):
                self._decide(other)
        self._try_form()

    def _on_approval_late(self) -> None:
        if self._awaiting is not None:
            self._on_answer(False, f"anybody within {self.spec.policy.approval_timeout_s:g} s")

    def _carry_out(self, fault: Fault, decision: Decision) -> None:
        strategy = decision.strategy
        if decision.isolate:
            self._isolate(fault.node, fault.message, fault.host)
        if heals(fault) and strategy in (Strategy.RECOVER_IN_PLACE, Strategy.RESTART):
            self._to_heal.add(fault.rank)
        if decision.roll_back:
            self._roll_back(fault)
        if strategy in (Strategy.DUMP, Strategy.FAIL):
            self._outcome = "failed"
            self._end_ranks(Phase.STOPPING, decision.reason)
        elif strategy in (Strategy.RESCHEDULE_JOB, Strategy.RESCHEDULE_JOB_ISOLATED):
            self._outcome = RESCHEDULED
            self._end_ranks(Phase.STOPPING, decision.reason)
        elif strategy in (*ANEW, Strategy.RESCHEDULE_POD):
            if strategy is Strategy.RESCHEDULE_POD:
                self._give_up(fault.node, decision.reason)
            self._end_ranks(Phase.RESTARTING, decision.reason)
        else:
            self._go_on(fault, decision)

    def _go_on(self, fault: Fault, decision: Decision) -> None:
        """Carry out an inner strategy: all healthy ranks wait meanwhile."""
        strategy = decision.strategy
        if strategy in (Strategy.RECOVER, Strategy.SHRINK):
            self._give_up(fault.node, decision.reason)
        if strategy is Strategy.SHRINK:
            self.roster.leave_out(fault.node)
        if fault.node not in self.roster.nodes:
            self._fall_back_on_standby()
        if strategy is Strategy.RECOVER_IN_PLACE:
            broken = self.roster.ranks[fault.rank]
            if broken.status not in (*GONE, Status.ENDING):
                self._kill([broken], grace_s=0.0)
        self._start_missing()

    def _give_up(self, node: int, reason: str) -> None:
        """Let go of a node that is still there; whoever takes its place is asked for."""
        if node not in self.roster.nodes:
            return  # it was lost, and was or will be asked for
        self._dismiss_agent(node, reason)
        self._fill(node)
        self._do(SetTimer("node", self.spec.policy.node_timeout_s))

    def _isolate(self, node: int, reason: str, host: str = "") -> None:
        """Have the engine place nothing more on a node's host."""
        agent = self.roster.nodes.get(node)
        host = host or (agent.host if agent else "")
        if host:
            self._record(
                journal.Isolated(incident=self.incidents.open, node=node, host=host, reason=reason)
            )

    def _older_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint that is older than what was resumed from."""
        nodes = self.roster.nodes.values()
        steps = (
            made[0]
            for node in nodes
            for made in node.checkpoints
            if made[0] < self._resumed and is_clean(made, self._suspicions)
        )
        return max(steps, default=None)

    def _roll_back(self, fault: Fault) -> None:
        """Take no state any more that is newer than the checkpoint before the last."""
        clean = self._older_checkpoint()
        assert clean is not None
        self._suspicions.append((self.generation, clean))
        self._record(journal.Suspected(generation=self.generation, clean=clean, rank=fault.rank))

    def on_heal_failed(self, node: int, message: p.HealFailed) -> None:
        """A rank's device could not be healed: it is of no use any more where it is."""
        rank = self.roster.ranks[message.rank]
        rank.status = Status.ABSENT
        text = f"the device of rank {message.rank} could not be healed: {message.error}"
        healed = (f for f in reversed(self.incidents.faults) if f.rank == message.rank and heals(f))
        before = next(healed, self._fault(Kind.DEVICE, rank, text))
        self._on_fault(msgspec.structs.replace(before, message=text, self_heal=False))
