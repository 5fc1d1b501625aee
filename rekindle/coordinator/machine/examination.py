"""Nodes of a job that stands still are measured: those that have become slow, and witnesses.

Their ranks are there, and hold the devices' memory: the check takes little of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rekindle import names
from rekindle.coordinator.machine.job_state import CancelTimer, Send, SetTimer
from rekindle.coordinator.machine.node_check import CheckRoom, Judged
from rekindle.coordinator.machine.roster import Node
from rekindle.job.spec import JobSpec
from rekindle.protocol.agent import Hello, Message
from rekindle.protocol.node_check import Checked, CheckReady
from rekindle.recovery.node_check.verdicts import NodeVerdict


class Examination:
    """A check room with nobody in it but these; what else their agents say is not for it."""

    def __init__(self, spec: JobSpec, nodes: Sequence[Node]) -> None:
        self.verdicts: dict[int, NodeVerdict] = {}
        self._nodes = {node.connection: node.node for node in nodes}
        self._room = CheckRoom(spec, len(nodes), beside_ranks=True)
        self.timers = self._room.timers
        self.on_timer, self.on_lost = self._room.on_timer, self._room.on_lost
        for node in nodes:
            self._room.on_hello(node.connection, _as_it_came(node, spec))

    @property
    def is_over(self) -> bool:
        """Whether all are judged that are still there."""
        return not self._room.is_busy

    def on_message(self, connection: int, message: Message) -> bool:
        """Take an answer; False: it is none."""
        if connection not in self._nodes or not isinstance(message, Checked | CheckReady):
            return False
        self._room.on_message(connection, message)
        return True

    def drain(self) -> Iterator[Send | SetTimer | CancelTimer]:
        """Give the commands since the last call."""
        for command in self._room.drain():
            if isinstance(command, Judged):
                self.verdicts[self._nodes[command.connection]] = command.verdict
            else:
                yield command


def _as_it_came(node: Node, spec: JobSpec) -> Hello:
    return Hello(
        job_id=spec.job_id,
        attempt=0,
        version=names.WIRE_VERSION,
        node=node.node,
        address=node.address,
        pid=node.pid,
        processes=spec.processes_per_node,
        host=node.host,
    )
