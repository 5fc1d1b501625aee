"""The ninth layer of the coordinator's mind: who was checked is taken in, or sent away for good."""

from __future__ import annotations

from rekindle.coordinator.machine.health_events import Watching
from rekindle.coordinator.machine.job_state import ENDING, Send
from rekindle.names import SPARE, WIRE_VERSION
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Fault, Kind
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.verdicts import Health, NodeVerdict

# What dlrover-run says of such nodes, for those who look for it in their logs.
_SAID = {
    Health.FAULTY: (Kind.NODE, "The node is down."),
    Health.STRAGGLER: (Kind.STRAGGLER, "The node is a straggler and exits."),
}


class Admitting(Watching):
    """A node that is sick takes no part: its host is isolated, and another is asked for."""

    def is_to_be_checked(self, connection: int, hello: p.Hello) -> bool:
        """Whether an agent is new, and would be taken in as things are."""
        spec = self.spec
        theirs = (hello.version, hello.job_id, hello.attempt, hello.processes)
        fits = theirs == (WIRE_VERSION, spec.job_id, self.attempt, spec.processes_per_node)
        is_new = not (self.roster.knows(connection) or hello.ranks or hello.ended)
        unwanted = self.phase in ENDING or self._isolation.refuses(hello)
        return fits and is_new and not unwanted

    def on_checked(self, connection: int, hello: p.Hello, verdict: NodeVerdict, now: float) -> None:
        """It is known how an agent's node is."""
        sick = verdict.health is Health.FAULTY or (
            verdict.health is Health.STRAGGLER and self.spec.exclude_straggler
        )
        fault = _fault(hello, verdict, now) if sick else None
        number = self.incidents.aside() if fault else 0
        self._record(
            journal.NodeChecked(
                host=hello.host,
                address=hello.address,
                pid=hello.pid,
                verdict=verdict,
                fault=fault,
                incident=number,
            )
        )
        if fault is None or self.phase in ENDING:
            self.on_hello(connection, hello)
            return
        self._do(Send(connection, p.Refused(reason=fault.message)))
        self.sent_home.add(connection)
        if hello.host:
            self._isolation.add([hello.host], [])
            isolated = journal.Isolated(
                incident=number, node=SPARE, host=hello.host, reason=fault.message
            )
            self._record(isolated)
        awaited = [node for node in self.roster.missing if node not in self.roster.vacant]
        if awaited:
            self._fill(awaited[0])
        else:
            self._record(journal.NodeWanted(node=SPARE))


def _fault(hello: p.Hello, verdict: NodeVerdict, now: float) -> Fault:
    kind, said = _SAID[verdict.health]
    where = hello.host or hello.address
    return Fault(
        kind=kind,
        message=f"{said} {where}: {verdict.reason}",
        at=now,
        host=hello.host,
        device=verdict.device,
        signature=kind.value,
    )
