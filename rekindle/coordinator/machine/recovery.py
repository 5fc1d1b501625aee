"""The decision about a fault, and its execution."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rekindle.coordinator.machine.checkpoints import Checkpoints
from rekindle.coordinator.machine.elasticity import Elasticity
from rekindle.coordinator.machine.endings import Endings
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.generations import Generations
from rekindle.coordinator.machine.job_state import (
    ENDING,
    CancelTimer,
    JobState,
    Phase,
    Proceed,
    SetTimer,
    Timer,
)
from rekindle.coordinator.machine.roster import GONE, Status
from rekindle.job.spec import KeepsOff
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import explained, explains, is_vague
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import FAILED, RESCHEDULED
from rekindle.recovery.policy.decide import Decision, decide
from rekindle.recovery.policy.history import Situation, besides, resets
from rekindle.recovery.policy.policy import INNER, RESET_BY, RESTARTS, Strategy
from rekindle.recovery.policy.strategies import is_met_by_restart
from rekindle.states import is_clean

# After such a fault, all ranks restart on another node than before.
LEAVES_ITS_NODE = (FaultKind.NODE_LOST, FaultKind.NODE, FaultKind.EVICTION)

# Time between two checks of present codes. The shortest rule about codes that stay too long is 20 s
# (MindCluster's faultDuration). This is also the time limit for a rank to meet the fault of a
# health event, and for a health event to explain the fault of a rank.
LOOK_S = 5.0

_ENDS = (Strategy.FAIL, Strategy.DUMP, Strategy.RESCHEDULE_JOB)  # later health events are ignored


class Recovery:
    """Decides about one fault at a time. While a decision waits for a user, other faults wait.

    If the cause of a rank's end is unknown and health events may come, a decision that would end
    the attempt waits for them.

    ways: the method that carries out each strategy.
    """

    def __init__(
        self,
        job: JobState,
        fleet: Fleet,
        checkpoints: Checkpoints,
        generations: Generations,
        endings: Endings,
        elasticity: Elasticity,
        proceed: Proceed,
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._generations = generations
        self._endings = endings
        self._elasticity = elasticity
        self._proceed = proceed
        self._roster = job.roster
        self._spec = job.spec
        self._incidents = job.incidents
        self.ways: dict[Strategy, Callable[[Fault, Decision], None]] = {
            **dict.fromkeys(INNER, self._go_on),
            **dict.fromkeys((*RESTARTS, Strategy.RESCHEDULE_POD), self._restart),
            Strategy.RESCHEDULE_JOB_ISOLATED: self._reschedule,
            Strategy.RESCHEDULE_JOB: self._reschedule,
            Strategy.DUMP: self._fail,
            Strategy.FAIL: self._fail,
        }

    def report(self, fault: Fault) -> None:
        """Handle a fault. The order of these steps is the protocol:

        1. A job that ends continues to end.
        2. A node that has just joined is left out of the world again.
        3. The fault gets the host of its node, and the code of a health event that explains it.
        4. The journal gets the fault, in the open incident or in a new one.
        5. The generation ends.
        6. The machine decides, except about a failed link of a live rank: its cause appears later.
        7. The machine reports ranks that have ended well, if the others regroup or wait for them.
        8. If all ranks wait already, the machine forms the next generation.
        """
        if self._job.phase in ENDING:
            self._endings.go_on_ending()
            return
        if self._job.is_on_trial(fault.node):
            self._elasticity.put_out(fault.node)
            self._elasticity.send_home(fault.node, fault.message)
            self._elasticity.go_on_regrouping()
            return
        agent = self._roster.nodes.get(fault.node)
        if agent is not None and not fault.host:
            fault = msgspec.structs.replace(fault, host=agent.host)
        fault = self._explained(fault)
        if not self._incidents.open:
            self._checkpoints.interval.fault()
        # A fault with a code that is noted already is one that a health event explains.
        if fault not in self._incidents.faults or not fault.code:
            self._job.record(self._incidents.note(fault))
        self._generations.declare_over()
        dead = fault.rank >= 0 and not self._roster.ranks[fault.rank].pid
        if dead or fault.kind is not FaultKind.LINK:
            self.decide(fault)
        if self._job.phase is Phase.RESTARTING:
            self._endings.go_on_ending()
        if self._roster.any_is(Status.EXITED):
            self._endings.miss_exited()
        self._proceed()

    def _explained(self, fault: Fault) -> Fault:
        """Return the fault of a rank with the code of an earlier health event that explains it."""
        for cause in self._job.health_events.unmet:
            if explains(cause, fault):
                self._job.health_events.unmet.remove(cause)
                return explained(fault, cause)
        return fault

    def decide(self, fault: Fault, *, is_last: bool = False) -> None:
        """Decide about a fault, and carry the decision out, unless it must wait.

        is_last: no further health event is expected about the fault.
        """
        if self._incidents.awaiting is not None:
            self._incidents.held.append(fault)
            return
        situation = self.situation(fault)
        if self._job.phase is Phase.RESTARTING and is_met_by_restart(self._spec.policy, situation):
            return
        decision = decide(self._spec.policy, situation)
        if not is_last and decision.strategy in _ENDS and self._may_learn_more(situation):
            self._incidents.doubted += (fault,)
            self._job.do(SetTimer(Timer.DOUBT, LOOK_S))
            return
        if fault.of_hardware:
            self._incidents.doubted = ()  # this fault is their cause
        self._job.record(self._incidents.decided(situation, decision))
        if decision.approval:
            self._incidents.awaiting = fault, decision
            self._job.do(SetTimer(Timer.APPROVAL, self._spec.policy.approval_timeout_s))
        else:
            self._carry_out(fault, decision)

    def _may_learn_more(self, situation: Situation) -> bool:
        fault = situation.fault
        nameless = is_vague(fault) or (fault.kind is FaultKind.LINK and not fault.code)
        return (
            situation.dead
            and nameless
            and (self._job.devices or self._job.health_events.has_reports)
        )

    def on_explanation_late(self, now: float) -> None:
        """Decide about the doubted faults, because no health event has explained them in time."""
        doubted, self._incidents.doubted = self._incidents.doubted, ()
        for fault in doubted:
            if self._job.phase not in (Phase.RESTARTING, *ENDING):
                self.decide(fault, is_last=True)

    def situation(self, fault: Fault) -> Situation:
        return Situation(
            fault=fault,
            session=self._job.session,
            formed=self._job.formed,
            starting=self._job.is_starting,
            is_over=self._job.is_over,
            newest=self._job.newest,
            can_join=self._spec.can_join,
            resumed=self._job.resumed,
            older=self._older_checkpoint() is not None,
            dead=fault.rank >= 0 and not self._roster.ranks[fault.rank].pid,
            spares=len(self._roster.spares.keys() - self._roster.promised.values()),
            left=self._roster.may_be_left_out(fault.node),
            engine=self._spec.engine,
            comes_back=self._spec.keeps_off is KeepsOff.RESTARTS,
            only_host=self._spec.keeps_off is KeepsOff.ONE_HOST,
            final_step=self._checkpoints.step_of_final_checkpoint(),
            alone=len(self._roster.members) == 1,
            incident=self._incidents.open,
            past=tuple(besides(self._incidents.past, fault)),
            common=self._generations.state_without(()).step
            if fault.kind is FaultKind.REPLICAS
            else 0,
            own_rule=bool(fault.code) and self._job.tables().has_rule_for_repeats(fault.code),
        )

    def approve(self, answer: p.Approval) -> str:
        """Handle a user's answer. Return why it has no effect, or an empty text."""
        if self._incidents.awaiting is None or self._job.phase in ENDING:
            return "no incident waits for approval"
        if answer.incident != self._incidents.open:
            return f"incident {self._incidents.open} waits for approval, not {answer.incident}"
        if answer.about not in (0.0, self._incidents.awaiting[0].at):
            return (
                "this request already has an answer, and another request waits now; read that "
                "one first"
            )
        self._on_answer(answer.granted, answer.by)
        return ""

    def _on_answer(self, granted: bool, by: str) -> None:
        assert self._incidents.awaiting is not None
        fault, decision = self._incidents.awaiting
        held, self._incidents.held, self._incidents.awaiting = self._incidents.held, [], None
        self._job.do(CancelTimer(Timer.APPROVAL))
        self._job.record(
            journal.Answered(
                incident=self._incidents.open, strategy=decision.strategy, granted=granted, by=by
            )
        )
        if not granted:
            reason = f"{fault.message}; {decision.strategy.value} was not approved by {by}"
            decision = Decision(strategy=Strategy.FAIL, reason=reason)
        self._carry_out(fault, decision)
        for other in held:
            if self._job.phase not in ENDING:
                self.decide(other)
        self._proceed()

    def on_approval_late(self, now: float) -> None:
        if self._incidents.awaiting is not None:
            self._on_answer(False, f"anybody within {self._spec.policy.approval_timeout_s:g} s")

    def _carry_out(self, fault: Fault, decision: Decision) -> None:
        strategy = decision.strategy
        if decision.isolate:
            self.isolate(fault.node, fault.message, fault.host)
        if resets(fault) and strategy in RESET_BY:
            self._fleet.to_reset.add(fault.rank)
        if decision.roll_back:
            self._roll_back(fault)
        self.ways[strategy](fault, decision)

    def _fail(self, fault: Fault, decision: Decision) -> None:
        self._endings.outcome = FAILED
        self._endings.end_ranks(Phase.STOPPING, decision.reason)

    def _reschedule(self, fault: Fault, decision: Decision) -> None:
        self._endings.outcome = RESCHEDULED
        self._endings.end_ranks(Phase.STOPPING, decision.reason)

    def _restart(self, fault: Fault, decision: Decision) -> None:
        if decision.strategy is Strategy.RESCHEDULE_POD or fault.kind in LEAVES_ITS_NODE:
            self._give_up(fault.node, decision.reason)
        if self._job.phase is not Phase.RESTARTING:  # otherwise all ranks end already
            self._endings.end_ranks(Phase.RESTARTING, decision.reason)

    def _go_on(self, fault: Fault, decision: Decision) -> None:
        """Carry out an inner strategy. All healthy ranks wait during this time."""
        strategy = decision.strategy
        if strategy in (Strategy.RECOVER, Strategy.SHRINK):
            self._give_up(fault.node, decision.reason)
        if self._job.phase is Phase.RESTARTING:
            return  # all ranks end, and start again when all nodes have joined
        if strategy is Strategy.SHRINK:
            self._roster.leave_out(fault.node)
        if fault.node not in self._roster.nodes:
            self._fleet.fall_back_on_standby()
        if strategy is Strategy.RECOVER_IN_PLACE:
            broken = self._roster.ranks[fault.rank]
            if broken.status not in (*GONE, Status.ENDING):
                self._fleet.kill([broken], grace_s=0.0)
        self._fleet.start_missing()

    def _give_up(self, node: int, reason: str) -> None:
        """Dismiss a node that still has its agent, and request another one."""
        if node not in self._roster.nodes:
            return  # its loss requests another one
        self._fleet.dismiss_agent(node, reason, replaced=True)
        self._fleet.fill(node)
        self._job.do(SetTimer(Timer.NODE, self._spec.policy.node_timeout_s))

    def isolate(self, node: int, reason: str, host: str = "") -> None:
        """Isolate a node's host: the engine does not place anything on it."""
        agent = self._roster.nodes.get(node)
        host = host or (agent.host if agent else "")
        if host:
            self._job.isolation.add([host], [node])
            self._job.record(
                journal.Isolated(incident=self._incidents.open, node=node, host=host, reason=reason)
            )
            self._fleet.dismiss_spares(host)

    def _older_checkpoint(self) -> int | None:
        """Return the step of the newest clean checkpoint before the resumed step, or None."""
        nodes = self._roster.nodes.values()
        steps = (
            state.step
            for node in nodes
            for state in node.checkpoints
            if state.step < self._job.resumed and is_clean(state, self._job.suspicions)
        )
        return max(steps, default=None)

    def _roll_back(self, fault: Fault) -> None:
        """Mark all states that are newer than the checkpoint before the last as suspect."""
        valid_steps = self._older_checkpoint()
        assert valid_steps is not None
        self._job.suspect_states(valid_steps, rank=fault.rank)

    def on_reset_failed(self, node: int, message: p.DeviceResetFailed, now: float) -> None:
        """Handle a failed reset of a rank's device. Report the fault again, as not resettable.

        If the agent could not try the reset, it has started the rank without it. The device's codes
        stay as they are: only a new one is a new fault.
        """
        rank = self._roster.ranks[message.rank]
        self._fleet.resetting -= {message.rank}
        if not message.tried:
            self._job.record(
                journal.ResetSkipped(
                    incident=self._incidents.open, rank=message.rank, reason=message.error
                )
            )
            return
        rank.status = Status.ABSENT
        text = f"the agent could not reset the device of rank {message.rank}: {message.error}"
        reset = (
            f for f in reversed(self._incidents.faults) if f.rank == message.rank and resets(f)
        )
        before = next(reset, self._job.fault(FaultKind.DEVICE, rank, text))
        self.report(
            msgspec.structs.replace(before, message=text, reset_helps=False, reset_failed=True)
        )
