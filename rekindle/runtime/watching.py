"""The sixth layer of the coordinator's mind: signs of trouble that somebody outside has seen."""

from __future__ import annotations

from abc import abstractmethod

from rekindle.errors import UsageError
from rekindle.recovery import journal
from rekindle.recovery.classification import Sign, Source, fault_of_sign, verdict_of
from rekindle.recovery.codes.verdict import Blame, Urgency, Verdict
from rekindle.recovery.fault import Fault
from rekindle.runtime.recovering import Recovering
from rekindle.runtime.state import ENDING, SetTimer

# How often codes that are present are looked at again: the shortest rule about codes that stay
# too long is of 20 s (MindCluster's faultDuration).
LOOK_S = 5.0


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
        """Answer codes that came too often or stay too long."""
        for host, device, verdict in self._signs.worse(self._tables(), now):
            for agent in [one for one in self.roster.members if one.host == host]:
                sign = Sign(source=Source.ASCEND, what=verdict.code, node=agent.node, device=device)
                self._answer_sign(sign, verdict, now)
        if self._signs.waits and self.phase not in ENDING:
            self._do(SetTimer("signs", LOOK_S))

    def _answer_sign(self, sign: Sign, verdict: Verdict, now: float) -> None:
        if verdict.urgency is Urgency.LATER and verdict.at_fault is not Blame.NOTHING:
            self._isolate(sign.node, f"{sign.in_words()}: {verdict.explanation}")
        elif verdict.urgency is Urgency.NOW and self.phase not in ENDING:
            self._on_fault(self._fault_of(sign, verdict, now))

    def _fault_of(self, sign: Sign, verdict: Verdict, now: float) -> Fault:
        first = sign.node * self.spec.processes_per_node
        rank = first + sign.device if sign.device >= 0 else -1
        finished = self.roster.ranks[rank if rank >= 0 else first].finished
        return fault_of_sign(sign, verdict, rank=rank, finished=finished, at=now)

    @abstractmethod
    def _on_fault(self, fault: Fault) -> None: ...
