"""Nodes outside the world, and nodes that join it."""

from __future__ import annotations

from collections import Counter

from rekindle.coordinator.machine.endings import Endings
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.generations import Generations
from rekindle.coordinator.machine.job_state import ENDING, JobState, Phase, Proceed
from rekindle.coordinator.machine.roster import Node, Status
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal


class Elasticity:
    """Handles the nodes outside the world. A node that joins is on trial until its first step."""

    def __init__(
        self,
        job: JobState,
        fleet: Fleet,
        generations: Generations,
        endings: Endings,
        proceed: Proceed,
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._generations = generations
        self._endings = endings
        self._proceed = proceed
        self._roster = job.roster
        self._spec = job.spec
        self._tries: Counter[int] = Counter()  # how often each new node was removed from the world

    @property
    def pause_cause(self) -> p.Cause | None:
        """Return why the world pauses: nodes wait to join it."""
        nodes = self._roster.arrived_outside if self._roster.outside else []
        return p.Cause(kind="join", ranks=self._roster.numbers_of(nodes)) if nodes else None

    def on_paused(self, now: float) -> None:
        """Take the waiting nodes into the world."""
        self._fleet.take_in()

    def work_in_pause(self) -> bool:
        """Take the waiting nodes into the world, because all ranks wait already."""
        if self._job.phase is Phase.REGROUPING and self._roster.outside:
            self._fleet.take_in()
        return False

    def on_outside_lost(self, lost: Node) -> None:
        """Handle the loss of a node outside the world. The engine may start another one."""
        self._endings.final_checkpoint_failed(lost.node, "the node is lost")
        if self._job.phase in (Phase.RESTARTING, *ENDING):
            self._endings.go_on_ending()
            return
        self._job.record(journal.NodeLeft(node=lost.node, address=lost.address, pid=lost.pid))
        self._fleet.spares_lost += 1
        if self._fleet.spares_lost <= self._spec.policy.max_recoveries:
            self._fleet.fill(lost.node)
        self.go_on_regrouping()

    def send_home(self, node: int, reason: str) -> None:
        """Dismiss an agent whose ranks cannot join the world. The engine does not replace it."""
        if self._job.phase in (Phase.RESTARTING, *ENDING):
            self._endings.go_on_ending()
            return
        self._fleet.dismiss_agent(node, reason)

    def put_out(self, node: int) -> None:
        """Remove a node that has just joined from the world."""
        self._job.newcomers.discard(node)
        self._generations.declare_over()
        self._roster.leave_out(node)

    def put_newcomers_out(self) -> None:
        """Remove the nodes that have just joined, because the links work without them.

        Their ranks start again, outside the world. If that fails too often, the agent is dismissed.
        """
        for node in sorted(filter(self._job.is_on_trial, self._job.newcomers)):
            self.put_out(node)
            self._tries[node] += 1
            if self._tries[node] > self._spec.policy.max_in_row:
                self.send_home(node, "the other ranks cannot reach its ranks")
            else:
                self._fleet.kill(self._roster.ranks_of(node), grace_s=0.0)

    def go_on_regrouping(self) -> None:
        """Continue to regroup: the ranks may have waited for a node that is left out now."""
        if self._job.phase in (Phase.GATHERING, Phase.REGROUPING):
            self._fleet.start_missing()
            self._proceed()

    def on_outside_late(self, now: float) -> None:
        """Dismiss the nodes whose ranks did not reach their Session in time."""
        late = (Status.SPAWNING, Status.STARTING)
        for node in self._roster.waiting_nodes:
            if any(rank.status in late for rank in self._roster.ranks_of(node)):
                limit_s = self._spec.policy.join_timeout_s
                why = f"its ranks did not reach their Session within {limit_s:g} s"
                self.send_home(node, why)
