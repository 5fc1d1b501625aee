"""The sixth layer of the coordinator's mind: signs of trouble that somebody outside has seen."""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from rekindle.errors import UsageError
from rekindle.recovery import journal
from rekindle.recovery.classification import (
    Sign,
    Source,
    explained,
    explains,
    fault_of_sign,
    verdict_of,
)
from rekindle.recovery.codes.verdict import Blame, Urgency, Verdict
from rekindle.recovery.fault import Fault, Kind, root_cause
from rekindle.runtime.recovering import Recovering
from rekindle.runtime.state import ENDING, SetTimer

# How often codes that are present are looked at again (the shortest rule about codes that stay too
# long is of 20 s, MindCluster's faultDuration), and how long a rank may take to meet the fault.
LOOK_S = 5.0

# A rank that suffers from any other kind ends, or says so itself.
_CERTAIN = (Kind.DEVICE, Kind.NODE, Kind.NODE_LOST, Kind.EVICTION)


class Watching(Recovering):
    """Each sign is written down; what it asks for is done once."""

    def on_sign(self, sign: Sign, now: float) -> str:
        """Take a sign; return why it cannot be taken, if it cannot."""
        if self.phase in ENDING:
            return "the job is ending"
        agent = self.roster.nodes.get(sign.node)
        if agent is None:
            return f"the job has no node {sign.node} now"
        per_node = self.spec.processes_per_node
        if not -1 <= sign.device < per_node:
            return f"node {sign.node} has devices 0 to {per_node - 1}; there is no {sign.device}"
        try:
            verdict = verdict_of(self._tables(), sign)
        except UsageError as error:
            return str(error)
        if not self._signs.note(sign, agent.host, now):
            return ""
        self._record(
            journal.SignSeen(
                sign=sign,
                host=agent.host,
                urgency=verdict.urgency,
                explanation=verdict.explanation,
            )
        )
        if not sign.gone and self._signs.answer(agent.host, sign.device, verdict):
            self._answer_sign(sign, verdict, now)
        self._look_at_signs(now)
        return ""

    def _look_at_signs(self, now: float) -> None:
        """Answer codes that came too often or stay too long, and faults that no rank has met."""
        for host, device, verdict in self._signs.worse(self._tables(), now):
            for agent in [one for one in self.roster.members if one.host == host]:
                sign = Sign(source=Source.ASCEND, what=verdict.code, node=agent.node, device=device)
                self._answer_sign(sign, verdict, now)
        unmet, self._signs.unmet = self._signs.unmet, []
        for fault in unmet:
            if now - fault.at < LOOK_S:
                self._signs.unmet.append(fault)
            elif fault.kind is Kind.DEVICE_MEMORY:
                # Its rank goes on with what may be damaged: only a new process can do without.
                self._strike(msgspec.structs.replace(fault, kind=Kind.DEVICE))
        if (self._signs.waits or self._signs.unmet) and self.phase not in ENDING:
            self._do(SetTimer("signs", LOOK_S))

    def _answer_sign(self, sign: Sign, verdict: Verdict, now: float) -> None:
        if verdict.urgency is Urgency.LATER and verdict.at_fault is not Blame.NOTHING:
            self._isolate(sign.node, f"{sign.in_words()}: {verdict.explanation}")
        if verdict.urgency is not Urgency.NOW:
            return
        fault = self._fault_of(sign, verdict, now)
        if told := self.incidents.explain(fault, LOOK_S):
            self._record(told)
        elif fault.rank >= 0 and fault.kind not in _CERTAIN:
            self._signs.unmet.append(fault)
        else:
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        """Answer a fault, unless a rank has told of the same before."""
        known = [seen for seen in self.incidents.faults if seen.rank == fault.rank >= 0]
        if not known or root_cause([*known, fault]) is fault:
            self._on_fault(fault)

    def _explained(self, fault: Fault) -> Fault:
        """Return what a rank has met with the code of the sign that came before it."""
        for sign in self._signs.unmet:
            if explains(sign, fault):
                self._signs.unmet.remove(sign)
                return explained(fault, sign)
        return fault

    def _fault_of(self, sign: Sign, verdict: Verdict, now: float) -> Fault:
        first = sign.node * self.spec.processes_per_node
        rank = first + sign.device if sign.device >= 0 else -1
        finished = self.roster.ranks[rank if rank >= 0 else first].finished
        return fault_of_sign(sign, verdict, rank=rank, finished=finished, at=now)

    @abstractmethod
    def _on_fault(self, fault: Fault) -> None: ...
