"""The sixth layer of the coordinator's mind: what is decided about a fault, and carrying it out."""

from __future__ import annotations

import msgspec

from rekindle.coordinator.machine.elasticity import Elastic
from rekindle.coordinator.machine.endings import GONE, STOP_GRACE_S
from rekindle.coordinator.machine.job_state import ENDING, RESCHEDULED, CancelTimer, Phase, SetTimer
from rekindle.coordinator.machine.ranks import Status
from rekindle.job.spec import KeepsOff
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import is_vague
from rekindle.recovery.faults.fault import Fault, Kind
from rekindle.recovery.faults.invalid_states import is_clean
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.case import Case
from rekindle.recovery.policy.decide import Decision, decide
from rekindle.recovery.policy.history import besides, heals
from rekindle.recovery.policy.policy import ANEW, Strategy
from rekindle.recovery.policy.strategies import is_met_by_restart

# How often codes that are present are looked at again (the shortest rule about codes that stay too
# long is of 20 s, MindCluster's faultDuration), and how long a rank may take to meet the fault that
# a sign tells of, or a sign to tell of what a rank has met.
LOOK_S = 5.0

HEALED_BY = (Strategy.RECOVER_IN_PLACE, Strategy.RESTART)
_ENDS = (Strategy.FAIL, Strategy.DUMP, Strategy.RESCHEDULE_JOB)  # nothing told later is heard


class Recovering(Elastic):
    """One decision at a time: while one waits for a person, nothing else is decided.

    Where a decision would end the attempt, and nobody knows of what a rank has died, it waits for a
    sign that may tell, if signs may come at all.
    """

    def _decide(self, fault: Fault, *, told_all: bool = False) -> None:
        if self._awaiting is not None:
            self._held_faults.append(fault)
            return
        case = self._case(fault)
        if self.phase is Phase.RESTARTING and is_met_by_restart(self.spec.policy, case):
            return
        if not told_all and self._may_be_told_more(case):
            self._doubted += (fault,)
            self._do(SetTimer("doubt", LOOK_S))
            return
        if fault.of_hardware:
            self._doubted = ()  # that is what they have died of
        decision, event = self.incidents.decide(case)
        self._record(event)
        if decision.approval:
            self._awaiting = fault, decision
            self._do(SetTimer("approval", self.spec.policy.approval_timeout_s))
        else:
            self._carry_out(fault, decision)

    def _may_be_told_more(self, case: Case) -> bool:
        signs_come = self._devices or self._signs.told
        nameless = is_vague(case.fault) or (case.fault.kind is Kind.LINK and not case.fault.code)
        if not (signs_come and nameless and case.dead):
            return False
        return decide(self.spec.policy, case).strategy in _ENDS

    def _on_told_all(self) -> None:
        """No sign has told more in time."""
        doubted, self._doubted = self._doubted, ()
        for fault in doubted:
            if self.phase not in (Phase.RESTARTING, *ENDING):
                self._decide(fault, told_all=True)

    def _case(self, fault: Fault) -> Case:
        return Case(
            fault=fault,
            session=self._session,
            formed=self._formed,
            newest=self.newest,
            joins=self.spec.joins,
            resumed=self._resumed,
            older=self._older_checkpoint() is not None,
            dead=fault.rank >= 0 and not self.roster.ranks[fault.rank].pid,
            spares=len(self.roster.free_spares),
            left=self.roster.may_be_left_out(fault.node),
            engine=self.spec.engine,
            comes_back=self.spec.keeps_off is KeepsOff.ANEW,
            last_words=self._step_of_last_words(),
            incident=self.incidents.open,
            past=tuple(besides(self.incidents.past, fault)),
        )

    def approve(self, answer: p.Approval) -> str:
        """A person has answered; return why that means nothing, if it does not."""
        if self._awaiting is None or self.phase in ENDING:
            return "nothing waits for approval"
        if answer.incident != self.incidents.open:
            return f"it is incident {self.incidents.open} that waits, not {answer.incident}"
        if answer.about not in (0.0, self._awaiting[0].at):
            return "that was answered meanwhile, and something else waits now: look at it first"
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
            if self.phase not in ENDING:
                self._decide(other)
        self._try_form()

    def _on_approval_late(self) -> None:
        if self._awaiting is not None:
            self._on_answer(False, f"anybody within {self.spec.policy.approval_timeout_s:g} s")

    def _carry_out(self, fault: Fault, decision: Decision) -> None:
        strategy = decision.strategy
        if decision.isolate:
            self._isolate(fault.node, fault.message, fault.host)
        if heals(fault) and strategy in HEALED_BY:
            self._to_heal.add(fault.rank)
        if decision.roll_back:
            self._roll_back(fault)
        if strategy in (Strategy.DUMP, Strategy.FAIL):
            self._outcome = "failed"
            self._end_ranks(Phase.STOPPING, decision.reason)
        elif strategy in (Strategy.RESCHEDULE_JOB, Strategy.RESCHEDULE_JOB_ISOLATED):
            self._outcome = RESCHEDULED
            self._end_ranks(Phase.STOPPING, decision.reason, self._failover_grace_s)
        elif strategy in (*ANEW, Strategy.RESCHEDULE_POD):
            placed_anew = strategy is Strategy.RESCHEDULE_POD
            if placed_anew or fault.kind is Kind.NODE_LOST:
                self._give_up(fault.node, decision.reason)
            if self.phase is not Phase.RESTARTING:  # else all ranks are being ended
                grace_s = self._failover_grace_s if placed_anew else STOP_GRACE_S
                self._end_ranks(Phase.RESTARTING, decision.reason, grace_s)
        else:
            self._go_on(fault, decision)

    @property
    def _failover_grace_s(self) -> float:
        return self.spec.failover_grace_s or STOP_GRACE_S

    def _go_on(self, fault: Fault, decision: Decision) -> None:
        """Carry out an inner strategy: all healthy ranks wait meanwhile."""
        strategy = decision.strategy
        if strategy in (Strategy.RECOVER, Strategy.SHRINK):
            self._give_up(fault.node, decision.reason)
        if self.phase is Phase.RESTARTING:
            return  # all ranks are being ended, and are started anew where there is a place
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
        self._dismiss_agent(node, reason, replaced=True)
        self._fill(node)
        self._do(SetTimer("node", self.spec.policy.node_timeout_s))

    def _isolate(self, node: int, reason: str, host: str = "") -> None:
        """Have the engine place nothing more on a node's host."""
        agent = self.roster.nodes.get(node)
        host = host or (agent.host if agent else "")
        if host:
            self._isolation.add([host], [node])
            self._record(
                journal.Isolated(incident=self.incidents.open, node=node, host=host, reason=reason)
            )
            self._dismiss_spares(host)

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
        self._healing -= {message.rank}
        text = f"the device of rank {message.rank} could not be healed: {message.error}"
        healed = (f for f in reversed(self.incidents.faults) if f.rank == message.rank and heals(f))
        before = next(healed, self._fault(Kind.DEVICE, rank, text))
        self._on_fault(
            msgspec.structs.replace(before, message=text, self_heal=False, heal_failed=True)
        )
