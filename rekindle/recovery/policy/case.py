"""The case to decide: one fault, with all that a decision may look at. Pure."""

from __future__ import annotations

import msgspec

from rekindle.recovery.faults.fault import SICK, Fault, Kind
from rekindle.recovery.policy.history import SAME_CODE_TIMES, Past, same_code
from rekindle.recovery.policy.policy import OUTER, Strategy


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision may look at.

    session: every rank of the broken generation trains through a Session.
    joins: a new process can take part in what those that are there have begun.
    formed: a generation of this job has been formed since the last restart.
    dead: the process of the fault's rank has ended.
    newest: most steps finished by any rank of the job.
    resumed: the step after which all ranks had last begun to train together.
    older: a checkpoint of an earlier step than `resumed` could be restored.
    spares: agents in reserve. left: nodes that the world may go on with, without those that are
        lost; 0: it may not.
    engine: the outer strategies that whoever steers the job can carry out.
    comes_back: a new node may come to the very host that it is to leave, while the job stands.
    last_words: step of the newest snapshot, if no checkpoint is as new.
    incident: number of the fault's incident.
    past: earlier faults and their strategies, oldest first.
    """

    fault: Fault
    session: bool
    formed: bool
    newest: int
    joins: bool = True
    dead: bool = False
    resumed: int = 0
    older: bool = False
    spares: int = 0
    left: int = 0
    engine: tuple[Strategy, ...] = OUTER
    comes_back: bool = False
    last_words: int | None = None
    incident: int = 0
    past: tuple[Past, ...] = ()

    @property
    def worn_out(self) -> str:
        """Say how often the device has shown this code, if that is too often; else nothing.

        A code of what is no fault of a device or node wears nothing out.
        """
        times = same_code(self.past, self.fault) if self.fault.kind in SICK else 0
        if times < SAME_CODE_TIMES:
            return ""
        return f"code {self.fault.code} came {times} times in a row within 24 h on this device"

    def failed_already(self, strategy: Strategy) -> bool:
        """Whether this strategy was tried in this incident, for this node, and did not help.

        Where no place was found, it is not told for which of the nodes.
        """
        fault = self.fault
        return any(
            p.strategy is strategy
            and p.incident == self.incident
            and (fault.kind is Kind.SCHEDULING or p.fault.node == fault.node)
            for p in self.past
        )
