"""Health events: faults that a monitor, an engine or a user reports."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.incidents import ExplainedFault
from rekindle.coordinator.machine.job_state import ENDING, JobState, SetTimer, Timer
from rekindle.coordinator.machine.moves import Moves
from rekindle.coordinator.machine.recovery import LOOK_S, Recovery
from rekindle.errors import UsageError
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import (
    CERTAIN,
    EventSource,
    HealthEvent,
    fault_of_event,
    verdict_of,
)
from rekindle.recovery.faults.fault import SICK, Fault, FaultKind, root_cause
from rekindle.recovery.faults.health_events import DCMI, attributed
from rekindle.recovery.faults.tables.verdict import Blame, Severity, Urgency, Verdict
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.decide import decide
from rekindle.recovery.policy.history import resets
from rekindle.recovery.policy.policy import RESET_BY, Strategy

# A code that a restart heals may be in readings for this time: agents read devices every 5 s.
HEALED_S = 2 * LOOK_S

NEVER_RAN = (
    FaultKind.SCHEDULING,
    FaultKind.USER_CODE,
)  # faults that prevent the start of a pod


class HealthEvents:
    """Records each health event, and answers it once.

    events_unmet: health events from before a takeover whose faults no rank has met.
    """

    def __init__(self, job: JobState, fleet: Fleet, moves: Moves, recovery: Recovery) -> None:
        self._job = job
        self._fleet = fleet
        self._moves = moves
        self._recovery = recovery
        self._roster = job.roster
        self._spec = job.spec
        self._incidents = job.incidents
        self.events_unmet: tuple[journal.HealthEventSeen, ...] = ()

    def resume(self, unmet: tuple[journal.HealthEventSeen, ...]) -> None:
        """Continue with the health events of an earlier coordinator.

        unmet: those that no rank has met.
        """
        self._job.health_events.recall(self._job.tables)
        self.events_unmet = unmet
        self.check_again()

    def take_over(self, hello: p.Hello) -> None:
        """Note the device faults that live ranks of this agent may still meet."""
        live, others = {rank.rank for rank in hello.ranks}, []
        for event in self.events_unmet:
            verdict = verdict_of(self._job.tables(), event.health_event)
            fault = self._fault_of(event.health_event, verdict, event.at)
            if fault.rank not in live:
                others.append(event)
            elif fault.kind is FaultKind.DEVICE_MEMORY:  # ranks report other kinds themselves
                self._job.health_events.unmet.append(fault)
        self.events_unmet = tuple(others)

    def on_health_event(self, health_event: HealthEvent, now: float) -> str:
        """Handle a health event. Return why it is refused, or an empty text."""
        if self._job.phase in ENDING:
            return "the job is ending"
        if health_event.node < 0 and health_event.host:
            return self._on_event_of_host(health_event, now)
        return self._on_event_of_node(health_event, now)

    def _on_event_of_node(self, health_event: HealthEvent, now: float) -> str:
        agent = self._roster.nodes.get(health_event.node)
        host = agent.host if agent else self._incidents.host_lost_with(health_event.node)
        if host is None and health_event.node not in self._roster.missing:
            return f"the job does not have a node {health_event.node} now"
        if health_event.host not in ("", host):
            if health_event.host != self._incidents.host_lost_with(health_event.node):
                return f"node {health_event.node} is not on {health_event.host}"
            # The health event does not concern the replacement.
            agent, host = None, health_event.host
        if agent is not None and health_event.address not in ("", agent.address):
            agent, host = None, self._incidents.host_lost_with(health_event.node)
        per_node = self._spec.processes_per_node
        if not -1 <= health_event.device < per_node:
            node, device = health_event.node, health_event.device
            return f"node {node} has devices 0 to {per_node - 1}, but not {device}"
        try:
            verdict = verdict_of(self._job.tables(), health_event)
        except UsageError as error:
            return str(error)
        if agent is None:
            self._on_event_of_missing(health_event, verdict, host, now)
            return ""
        moves = verdict.urgency is Urgency.SOON and not health_event.gone
        obstacle = self._moves.obstacle(health_event.node) if moves else ""
        if not self._write_down(health_event, agent.host, verdict, now):
            return ""
        if obstacle:
            return obstacle
        worse = self._answer_worse(now)  # more specific than the code itself
        news = not health_event.gone and self._job.health_events.answer(
            agent.host, health_event.device, verdict
        )
        if news and (agent.host, health_event.device) not in worse:
            self._answer_event(health_event, verdict, now)
        self.check_again()
        return ""

    def _on_event_of_host(self, health_event: HealthEvent, now: float) -> str:
        """Handle a health event of a host for each node on it. Return the first refusal."""
        host = health_event.host
        nodes = sorted(n.node for n in self._roster.nodes.values() if n.host == host)
        if not nodes:
            return f"the job has no node on host {host} now"
        refusals = [
            self._on_event_of_node(msgspec.structs.replace(health_event, node=node), now)
            for node in nodes
        ]
        return next(filter(None, refusals), "")

    def on_conditions(self, node: int, message: p.Conditions, now: float) -> None:
        """Handle an agent's readings of its devices.

        Each code that is new, more severe or gone is a health event. The method ignores the
        readings of a device during its reset. A code that a restart of the processes had to heal,
        and that stays, is a fault.
        """
        host, first = self._roster.nodes[node].host, node * self._spec.processes_per_node
        for device, found in message.devices.items():
            if first + device in self._fleet.resetting:
                continue
            present = self._job.health_events.codes(host, device)
            before = {code: each.severity or Severity.NOTICE for code, each in present.items()}
            codes = attributed(found.health, found.codes, before, self._acts)
            ended = before.keys() - codes.keys()
            gone = {code: before[code] for code in ended if present[code].by == DCMI}
            news = {code: each for code, each in codes.items() if before.get(code) != each}
            for code, severity in sorted((gone | news).items()):
                health_event = HealthEvent(
                    source=EventSource.ASCEND,
                    what=code,
                    node=node,
                    device=device,
                    gone=code in gone,
                    by=DCMI,
                    severity=severity,
                )
                self.on_health_event(health_event, now)
            unhealed = self._job.health_events.read(host, device, found.codes, now, HEALED_S)
            if self._roster.ranks[first + device].pid and self._job.phase not in ENDING:
                self._answer_unhealed(unhealed, now)

    def _answer_unhealed(self, found: Iterable[HealthEvent], now: float) -> None:
        """Answer the codes that DCMI still reports after the start of a process on the device."""
        for health_event in found:
            verdict = verdict_of(self._job.tables(), health_event)
            if not verdict.restart_heals or verdict.urgency is not Urgency.NOW:
                continue
            fault = self._fault_of(health_event, verdict, now)
            text = "it was not healed: DCMI still reports it after the start of a new process"
            self._strike(
                msgspec.structs.replace(
                    fault,
                    kind=FaultKind.DEVICE,
                    message=f"{fault.message}; {text}",
                    reset_helps=False,
                    restart_heals=False,
                    reset_failed=True,
                )
            )

    def _acts(self, code: str) -> bool:
        """Return whether a table demands something about this code of a chip."""
        verdict = self._job.tables().ascend(code)
        return verdict.listed and verdict.urgency is not Urgency.NONE

    def _on_event_of_missing(
        self, health_event: HealthEvent, verdict: Verdict, host: str | None, now: float
    ) -> None:
        """Note why a node was lost, or why no other node comes."""
        fault = self._fault_of(health_event, verdict, now)
        if verdict.kind not in NEVER_RAN:
            if host is not None and self._write_down(health_event, host, verdict, now):
                self._explain(fault)
        elif health_event.node in self._roster.missing:
            self._roster.obstacles[health_event.node] = verdict.explanation
            if verdict.kind is FaultKind.USER_CODE:
                self._recovery.report(fault)  # waiting is useless: the pod's description is invalid

    def _write_down(
        self, health_event: HealthEvent, host: str, verdict: Verdict, now: float
    ) -> bool:
        """Record a health event if it is new. Return whether it is new."""
        news = self._job.health_events.note(health_event, host, now)
        if news:
            self._job.record(
                journal.HealthEventSeen(
                    health_event=health_event,
                    host=host,
                    urgency=verdict.urgency,
                    explanation=verdict.explanation,
                )
            )
        return news

    def on_spawned(self, node: int, message: p.Spawned, now: float) -> None:
        """Handle ranks that started. After a device reset, later health events count as new."""
        reset = self._fleet.resetting & {live.rank for live in message.ranks}
        self._fleet.resetting -= reset
        for number in sorted(reset):
            node, device = divmod(number, self._spec.processes_per_node)
            host = self._roster.nodes[node].host
            for source, what in self._job.health_events.present(host, device):
                gone = HealthEvent(
                    source=source, what=what, node=node, device=device, gone=True, by="its reset"
                )
                self._write_down(gone, host, verdict_of(self._job.tables(), gone), now)
        self.note_starts(self._roster.nodes[node].host, message.ranks)

    def note_starts(self, host: str, ranks: Iterable[p.LiveRank]) -> None:
        """Note that these ranks have started on a host."""
        for live in ranks:
            device = live.rank % self._spec.processes_per_node
            self._job.health_events.started(host, device)

    def check_events(self, now: float) -> None:
        """Answer codes that have become worse, and faults that no rank has met."""
        self._answer_worse(now)
        self._answer_unmet(now)
        self.check_again()

    def check_again(self) -> None:
        """Set the timer for the next check, if a health event may still need an answer."""
        if (
            self._job.health_events.waits or self._job.health_events.unmet
        ) and self._job.phase not in ENDING:
            self._job.do(SetTimer(Timer.HEALTH_EVENTS, LOOK_S))

    def _answer_worse(self, now: float) -> set[tuple[str, int]]:
        """Answer codes that came too often or stay too long. Return their devices."""
        devices = set()
        for host, device, verdict in self._job.health_events.worse(self._job.tables(), now):
            devices.add((host, device))
            for agent in [one for one in self._roster.members if one.host == host]:
                health_event = HealthEvent(
                    source=EventSource.ASCEND, what=verdict.code, node=agent.node, device=device
                )
                self._answer_event(health_event, verdict, now)
        return devices

    def _answer_unmet(self, now: float) -> None:
        """Answer faults that no rank has met in time."""
        unmet, self._job.health_events.unmet = self._job.health_events.unmet, []
        for fault in unmet:
            if now - fault.at < LOOK_S:
                self._job.health_events.unmet.append(fault)
            elif fault.kind is FaultKind.DEVICE_MEMORY:
                # The rank continues with memory that may be damaged. Only a new process avoids that
                # memory.
                self._strike(msgspec.structs.replace(fault, kind=FaultKind.DEVICE))

    def _answer_event(self, health_event: HealthEvent, verdict: Verdict, now: float) -> None:
        if verdict.urgency is Urgency.LATER and verdict.at_fault is not Blame.NOTHING:
            self._recovery.isolate(
                health_event.node, f"{health_event.in_words()}: {verdict.explanation}"
            )
            self._move(health_event, verdict, now)
        if verdict.urgency is Urgency.SOON:
            self._move(health_event, verdict, now)
        if verdict.urgency is not Urgency.NOW:
            return
        fault = self._fault_of(health_event, verdict, now)
        if self._explain(fault):
            return
        if fault.kind in CERTAIN:
            self._strike(fault)
        elif fault.rank >= 0:
            self._job.health_events.unmet.append(fault)

    def _move(self, health_event: HealthEvent, verdict: Verdict, now: float) -> None:
        """Move the node of a health event, if it can move. Otherwise it continues to train."""
        deadline = now + health_event.within_s if health_event.within_s > 0 else 0.0
        reason, by = verdict.explanation, health_event.by or "a monitor"
        self._moves.request(health_event.node, reason, by=by, at=(now, deadline))

    def _explain(self, cause: Fault) -> bool:
        """Add the code of a health event to the fault that it explains.

        Return whether there is one.
        """
        explained = self._incidents.explain(cause, LOOK_S)
        if explained is None:
            return False
        self._job.record(explained.event)
        self._on_explained(explained)
        return True

    def _on_explained(self, explained: ExplainedFault) -> None:
        """Decide again about a fault that a health event explains, if the answer changes."""
        self._incidents.doubted = tuple(
            fault for fault in self._incidents.doubted if fault != explained.before
        )
        self._incidents.held = [
            fault for fault in self._incidents.held if fault != explained.before
        ]
        if explained.strategy is None or not self._is_answered(explained, explained.strategy):
            self._recovery.report(explained.event.fault)

    def _is_answered(self, explained: ExplainedFault, strategy: Strategy) -> bool:
        """Return whether the earlier decision is still right for the fault as it is known now."""
        fault = explained.event.fault
        if fault.kind not in SICK:
            return True
        decision = decide(self._spec.policy, self._recovery.situation(fault))
        resetting = resets(fault) and not resets(explained.before) and decision.strategy in RESET_BY
        return decision.strategy is strategy and not decision.isolate and not resetting

    def _strike(self, fault: Fault) -> None:
        """Report a fault, unless an earlier fault of its rank is the root cause."""
        others = [each for each in self._incidents.faults if each.rank == fault.rank >= 0]
        if not others or root_cause([*others, fault]) is fault:
            self._recovery.report(fault)

    def _fault_of(self, health_event: HealthEvent, verdict: Verdict, now: float) -> Fault:
        first = health_event.node * self._spec.processes_per_node
        rank = first + health_event.device if health_event.device >= 0 else -1
        finished = self._roster.ranks[rank if rank >= 0 else first].finished
        return fault_of_event(health_event, verdict, rank=rank, finished=finished, at=now)
