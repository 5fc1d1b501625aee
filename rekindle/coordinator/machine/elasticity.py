"""The fifth layer of the coordinator's mind: nodes that the world goes on without, or takes in."""

from __future__ import annotations

from rekindle.coordinator.machine.endings import Ending
from rekindle.coordinator.machine.job_state import ENDING, Phase, Send
from rekindle.coordinator.machine.ranks import Status
from rekindle.coordinator.machine.roster import Node
from rekindle.names import SPARE
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal


class Elastic(Ending):
    """A node outside the world disturbs nobody; one that was taken in is on trial for a step."""

    def _on_outside_lost(self, lost: Node) -> None:
        """A node is gone that the world goes on without; another one may come."""
        self._dump_failed(lost.node, "the node is lost")
        if self.phase in (Phase.RESTARTING, *ENDING):
            self._go_on_ending()
            return
        self._record(journal.NodeLeft(node=lost.node, address=lost.address, pid=lost.pid))
        self._spares_lost += 1
        if self._spares_lost <= self.spec.policy.max_recoveries:
            self._fill(lost.node)
        self._go_on_regrouping()

    def _send_home(self, node: int, reason: str) -> None:
        """End an agent whose ranks cannot take part; it is not asked for again."""
        if self.phase in (Phase.RESTARTING, *ENDING):
            self._go_on_ending()
            return
        self._dismiss_agent(node, reason)

    def _dismiss_agent(self, node: int, reason: str, *, replaced: bool = False) -> None:
        """Tell an agent to end; its ranks end with it, and what it still says is not heard.

        replaced: another one is to come. An agent that ends well would be taken for one whose work
        is done, and nothing would come in the place of its pod.
        """
        agent = self.roster.nodes[node]
        left = journal.NodeLeft(
            node=node, address=agent.address, pid=agent.pid, reason=reason, replaced=replaced
        )
        self._record(left)
        self._do(Send(agent.connection, p.Bye(status=1 if replaced else 0)))
        self.sent_home.add(agent.connection)
        self._injections.lost(self.roster.ranks_of(node))
        self._store.node_lost(node)
        self.roster.lose(agent)

    def _dismiss_spares(self, host: str) -> None:
        """Tell spares to end that wait where nothing is to be; others come elsewhere."""
        for connection, spare in list(self.roster.spares.items()):
            if spare.host == host and self._isolation.shuts_out(host):
                self._do(Send(connection, p.Bye(status=1)))
                self.sent_home.add(connection)
                self._on_spare_lost(connection)

    def _on_spare_lost(self, connection: int) -> None:
        """A spare is gone: training does not notice, unless it was to take a place."""
        lost = self.roster.lose_spare(connection)
        if lost is None or self.phase in ENDING:
            return
        spare, promised = lost
        left = len(self.roster.free_spares)
        self._record(journal.SpareLost(address=spare.address, pid=spare.pid, left=left))
        for node in promised:
            self._fill(node)
        self._spares_lost += 1
        if not promised and self._spares_lost <= self.spec.policy.max_recoveries:
            self._record(journal.NodeWanted(node=SPARE))

    def _is_on_trial(self, node: int) -> bool:
        """Whether a node was just taken in, and the world may go on without it."""
        if node not in self._newcomers or self.phase in (Phase.RESTARTING, *ENDING):
            return False
        left = sum(member.node != node for member in self.roster.members)
        return left >= self.spec.least_nodes

    def _put_out(self, node: int) -> None:
        """Go on without a node that was just taken in."""
        self._newcomers.discard(node)
        self._declare_over()
        self.roster.leave_out(node)

    def _put_newcomers_out(self) -> None:
        """The links work without those who were just taken in; they are started anew, outside."""
        for node in sorted(filter(self._is_on_trial, self._newcomers)):
            self._put_out(node)
            self._tries[node] += 1
            if self._tries[node] > self.spec.policy.max_in_row:
                self._send_home(node, "the others cannot reach its ranks")
            else:
                self._kill(self.roster.ranks_of(node), grace_s=0.0)

    def _go_on_regrouping(self) -> None:
        """What the ranks waited for may be missed no more."""
        if self.phase in (Phase.GATHERING, Phase.REGROUPING):
            self._start_missing()
            self._try_form()

    def _fall_back_on_standby(self) -> None:
        """Take in nodes that are at the door when others are missed, or too few are left."""
        for node in self.roster.standby:
            if self.roster.missing or len(self.roster.members) < self.spec.least_nodes:
                self.roster.take_in(node)

    def _on_outside_late(self) -> None:
        """Send home the nodes whose ranks did not reach their Session."""
        late = (Status.SPAWNING, Status.STARTING)
        for node in self.roster.at_the_door:
            if any(rank.status in late for rank in self.roster.ranks_of(node)):
                limit_s = self.spec.policy.join_timeout_s
                why = f"its ranks did not reach their Session within {limit_s:g} s"
                self._send_home(node, why)
