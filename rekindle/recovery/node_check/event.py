"""What the journal tells of nodes that were checked. Pure."""

from __future__ import annotations

from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.journal.checkpoint_events import Event
from rekindle.recovery.node_check.verdicts import NodeVerdict


class NodeChecked(Event, frozen=True, kw_only=True, tag="node-checked"):
    """A node was checked before it was taken in; verdict: what it is.

    fault: if it was sent away, and another is asked for; that is an incident of its own then.
    """

    host: str
    address: str
    pid: int
    verdict: NodeVerdict
    fault: Fault | None = None
    incident: int = 0

    def in_words(self) -> str:
        """Say how the node is."""
        where = self.host or self.address
        if self.fault is not None:
            return f"incident {self.incident}: {self.fault.message}; another node is asked for"
        return f"{where} is checked: {self.verdict.in_words()}"
