"""Health events: faults that a monitor, an engine or a user reports."""

from __future__ import annotations

import msgspec

from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.incidents import ExplainedFault
from rekindle.coordinator.machine.job_state import ENDING, JobState, SetTimer, Timer
from rekindle.coordinator.machine.recovery import LOOK_S, RESET_BY, Recovery
from rekindle.errors import UsageError
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import (
    CERTAIN,
    EventSource,
    HealthEvent,
    fault_of_sign,
    verdict_of,
)
from rekindle.recovery.faults.fault import SICK, Fault, FaultKind, root_cause
from rekindle.recovery.faults.tables.verdict import Blame, Urgency, Verdict
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.decide import decide
from rekindle.recovery.policy.history import reset_helps
from rekindle.recovery.policy.policy import Strategy

DCMI = "DCMI"  # the source of the agents' readings of devices

NEVER_RAN = (
    FaultKind.SCHEDULING,
    FaultKind.USER_CODE,
)  # faults that prevent the start of a pod


class HealthEvents:
    """Records each health event, and answers it once.

    signs_unmet: signs from before a takeover whose faults no rank has met.
    """

    def __init__(self, job: JobState, fleet: Fleet, recovery: Recovery) -> None:
        self._job = job
        self._fleet = fleet
        self._recovery = recovery
        self._roster = job.roster
        self._spec = job.spec
        self._incidents = job.incidents
        self.signs_unmet: tuple[journal.SignSeen, ...] = ()

    def resume(self, unmet: tuple[journal.SignSeen, ...]) -> None:
        """Continue with the signs of an earlier coordinator. unmet: signs that no rank has met."""
        self._job.signs.recall(self._job.tables)
        self.signs_unmet = unmet
        self.look_again()

    def take_over(self, hello: p.Hello) -> None:
        """Note the device faults that live ranks of this agent may still meet."""
        live, others = {rank.rank for rank in hello.ranks}, []
        for seen in self.signs_unmet:
            verdict = verdict_of(self._job.tables(), seen.sign)
            fault = self._fault_of(seen.sign, verdict, seen.at)
            if fault.rank not in live:
                others.append(seen)
            elif fault.kind is FaultKind.DEVICE_MEMORY:  # ranks report other kinds themselves
                self._job.signs.unmet.append(fault)
        self.signs_unmet = tuple(others)

    def on_sign(self, sign: HealthEvent, now: float) -> str:
        """Handle a sign. Return why it is refused, or an empty text."""
        if self._job.phase in ENDING:
            return "the job is ending"
        agent = self._roster.nodes.get(sign.node)
        host = agent.host if agent else self._incidents.host_lost_with(sign.node)
        if host is None and sign.node not in self._roster.missing:
            return f"the job does not have a node {sign.node} now"
        if sign.host not in ("", host):
            if sign.host != self._incidents.host_lost_with(sign.node):
                return f"node {sign.node} is not on {sign.host}"
            agent, host = None, sign.host  # the sign does not concern the replacement
        if agent is not None and sign.address not in ("", agent.address):
            agent, host = None, self._incidents.host_lost_with(sign.node)
        per_node = self._spec.processes_per_node
        if not -1 <= sign.device < per_node:
            return f"node {sign.node} has devices 0 to {per_node - 1}, but not {sign.device}"
        try:
            verdict = verdict_of(self._job.tables(), sign)
        except UsageError as error:
            return str(error)
        if agent is None:
            self._on_sign_of_missing(sign, verdict, host, now)
            return ""
        if not self._write_down(sign, agent.host, verdict, now):
            return ""
        worse = self._answer_worse(now)  # more specific than the code itself
        news = not sign.gone and self._job.signs.answer(agent.host, sign.device, verdict)
        if news and (agent.host, sign.device) not in worse:
            self._answer_sign(sign, verdict, now)
        self.look_again()
        return ""

    def on_conditions(self, node: int, message: p.Conditions, now: float) -> None:
        """Handle an agent's readings of its devices: each new or vanished code is a sign.

        The method ignores the readings of a device during its reset.
        """
        host, first = self._roster.nodes[node].host, node * self._spec.processes_per_node
        for device, found in message.devices.items():
            if first + device in self._fleet.resetting:
                continue
            before, codes = self._job.signs.codes_by(DCMI, host, device), set(found.codes)
            for code in sorted(before ^ codes):
                sign = HealthEvent(
                    source=EventSource.ASCEND,
                    what=code,
                    node=node,
                    device=device,
                    gone=code in before,
                    by=DCMI,
                    # The device's health is the severity of its worst fault.
                    severity=found.health,
                )
                self.on_sign(sign, now)

    def _on_sign_of_missing(
        self, sign: HealthEvent, verdict: Verdict, host: str | None, now: float
    ) -> None:
        """Note why a node was lost, or why no other node comes."""
        fault = self._fault_of(sign, verdict, now)
        if verdict.kind not in NEVER_RAN:
            if host is not None and self._write_down(sign, host, verdict, now):
                self._tell(fault)
        elif sign.node in self._roster.missing:
            self._roster.obstacles[sign.node] = verdict.explanation
            if verdict.kind is FaultKind.USER_CODE:
                self._recovery.report(fault)  # waiting is useless: the pod's description is invalid

    def _write_down(self, sign: HealthEvent, host: str, verdict: Verdict, now: float) -> bool:
        """Record a sign if it is new. Return whether it is new."""
        news = self._job.signs.note(sign, host, now)
        if news:
            self._job.record(
                journal.SignSeen(
                    sign=sign, host=host, urgency=verdict.urgency, explanation=verdict.explanation
                )
            )
        return news

    def on_healed(self, message: p.Spawned, now: float) -> None:
        """Handle ranks that started after a device reset: later health events count as new."""
        reset = self._fleet.resetting & {live.rank for live in message.ranks}
        self._fleet.resetting -= reset
        for number in sorted(reset):
            node, device = divmod(number, self._spec.processes_per_node)
            host = self._roster.nodes[node].host
            for source, what in self._job.signs.present(host, device):
                gone = HealthEvent(
                    source=source, what=what, node=node, device=device, gone=True, by="its reset"
                )
                self._write_down(gone, host, verdict_of(self._job.tables(), gone), now)

    def look_at_signs(self, now: float) -> None:
        """Answer codes that have become worse, and faults that no rank has met."""
        self._answer_worse(now)
        self._answer_unmet(now)
        self.look_again()

    def look_again(self) -> None:
        """Set the timer for the next check, if a health event may still need an answer."""
        if (self._job.signs.waits or self._job.signs.unmet) and self._job.phase not in ENDING:
            self._job.do(SetTimer(Timer.SIGNS, LOOK_S))

    def _answer_worse(self, now: float) -> set[tuple[str, int]]:
        """Answer codes that came too often or stay too long. Return their devices."""
        devices = set()
        for host, device, verdict in self._job.signs.worse(self._job.tables(), now):
            devices.add((host, device))
            for agent in [one for one in self._roster.members if one.host == host]:
                sign = HealthEvent(
                    source=EventSource.ASCEND, what=verdict.code, node=agent.node, device=device
                )
                self._answer_sign(sign, verdict, now)
        return devices

    def _answer_unmet(self, now: float) -> None:
        """Answer faults that no rank has met in time."""
        unmet, self._job.signs.unmet = self._job.signs.unmet, []
        for fault in unmet:
            if now - fault.at < LOOK_S:
                self._job.signs.unmet.append(fault)
            elif fault.kind is FaultKind.DEVICE_MEMORY:
                # The rank continues with memory that may be damaged. Only a new process avoids that
                # memory.
                self._strike(msgspec.structs.replace(fault, kind=FaultKind.DEVICE))

    def _answer_sign(self, sign: HealthEvent, verdict: Verdict, now: float) -> None:
        if verdict.urgency is Urgency.LATER and verdict.at_fault is not Blame.NOTHING:
            self._recovery.isolate(sign.node, f"{sign.in_words()}: {verdict.explanation}")
        if verdict.urgency is not Urgency.NOW:
            return
        fault = self._fault_of(sign, verdict, now)
        if self._tell(fault):
            return
        if fault.kind in CERTAIN:
            self._strike(fault)
        elif fault.rank >= 0:
            self._job.signs.unmet.append(fault)

    def _tell(self, sign: Fault) -> bool:
        """Add the code of a sign to the fault that it explains. Return whether there is one."""
        told = self._incidents.explain(sign, LOOK_S)
        if told is None:
            return False
        self._job.record(told.event)
        self._on_told(told)
        return True

    def _on_told(self, told: ExplainedFault) -> None:
        """Decide again about a fault that a health event explains, if the answer changes."""
        self._incidents.doubted = tuple(
            fault for fault in self._incidents.doubted if fault != told.before
        )
        self._incidents.held = [fault for fault in self._incidents.held if fault != told.before]
        if told.strategy is None or not self._is_answered(told, told.strategy):
            self._recovery.report(told.event.fault)

    def _is_answered(self, told: ExplainedFault, strategy: Strategy) -> bool:
        """Return whether the earlier decision is still right for the fault as it is known now."""
        fault = told.event.fault
        if fault.kind not in SICK:
            return True
        decision = decide(self._spec.policy, self._recovery.case(fault))
        resetting = (
            reset_helps(fault) and not reset_helps(told.before) and decision.strategy in RESET_BY
        )
        return decision.strategy is strategy and not decision.isolate and not resetting

    def _strike(self, fault: Fault) -> None:
        """Report a fault, unless an earlier fault of its rank is the root cause."""
        known = [seen for seen in self._incidents.faults if seen.rank == fault.rank >= 0]
        if not known or root_cause([*known, fault]) is fault:
            self._recovery.report(fault)

    def _fault_of(self, sign: HealthEvent, verdict: Verdict, now: float) -> Fault:
        first = sign.node * self._spec.processes_per_node
        rank = first + sign.device if sign.device >= 0 else -1
        finished = self._roster.ranks[rank if rank >= 0 else first].finished
        return fault_of_sign(sign, verdict, rank=rank, finished=finished, at=now)
