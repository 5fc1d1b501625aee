"""Agents and processes: spares, starts, kills and dismissals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rekindle.coordinator.machine.inheritance import Placement
from rekindle.coordinator.machine.injections import Injections
from rekindle.coordinator.machine.job_state import ENDING, JobState, Phase, Send, SetTimer, Timer
from rekindle.coordinator.machine.ranks import GONE, Rank, Status, group_by_node
from rekindle.names import KILLED_S, SPARE
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal


class Fleet:
    """Finds agents for nodes, starts and ends ranks, and asks for the ranks' store.

    placements: the agents that each node has had. to_reset: ranks whose device is reset before they
    start. resetting: ranks that are to start with a reset device. spares_lost: nodes in
    reserve that were lost so far. late_passed: whoever is to come had the time for it. settings:
    of all ranks.
    """

    def __init__(
        self,
        job: JobState,
        injections: Injections,
        placements: Mapping[int, Iterable[Placement]],
        settings: p.Settings,
    ) -> None:
        self._job = job
        self._injections = injections
        self.placements = {node: set(each) for node, each in placements.items()}
        self._roster = job.roster
        self._spec = job.spec
        self.to_reset: set[int] = set()
        self.resetting: frozenset[int] = frozenset()
        self.spares_lost = 0  # whoever kills them may not be done
        self.late_passed = False
        self.settings = settings

    def promote(self) -> None:
        """Ask spares to become the nodes that are vacant."""
        free = self._roster.free_spares
        places = sorted(self._roster.vacant - self._roster.promised.keys()) if free else []
        for node, spare in zip(places, free, strict=False):
            self._roster.promised[node] = spare
            self._job.do(Send(spare, p.Promote(node=node)))

    def fill(self, node: int) -> None:
        """Find an agent for a node that has none: a spare, or one that the engine brings."""
        self._roster.vacant.add(node)
        self.promote()
        by_spare = node in self._roster.promised
        self._job.record(journal.NodeWanted(node=SPARE if by_spare else node))

    def fill_all(self) -> None:
        """Ask for all nodes that did not come: their launcher may have died before it did."""
        for node in self._roster.missing:
            if node not in self._roster.vacant:  # else it was asked for when it was lost
                self.fill(node)

    def _spawn(self, node: int, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.status = Status.SPAWNING
        outside = 0 if ranks[0].inside else self._spec.processes_per_node
        spawn = p.Spawn(
            generation=self._job.generation + 1,
            restart=self._job.restarts,
            ranks=tuple(rank.rank for rank in ranks),
            store_host=self._job.store.host,
            store_port=self._job.store.port,
            world_size=self._roster.world_size + outside,
            first=self._roster.place_of(self._roster.ranks_of(node)[0]),
            reset=tuple(rank.rank for rank in ranks if rank.rank in self.to_reset),
            placements=max(1, len(self.placements.get(node, ()))),
            joins=self._job.formed and any(rank.goes_on for rank in self._roster.world),
        )
        self.to_reset -= set(spawn.reset)
        self.resetting |= set(spawn.reset)
        self._job.do(Send(self._roster.nodes[node].connection, spawn))

    def kill(self, ranks: list[Rank], grace_s: float) -> None:
        """End these ranks: SIGTERM, then SIGKILL after `grace_s`; at once if that is 0."""
        nodes = self._roster.nodes
        alive = [rank for rank in ranks if rank.node in nodes and rank.status not in GONE]
        for number, doomed in group_by_node(alive).items():
            numbers = tuple(rank.rank for rank in doomed)
            self._job.do(Send(nodes[number].connection, p.Kill(ranks=numbers, grace_s=grace_s)))
            for rank in doomed:
                rank.status = Status.ENDING
        if alive:
            self._job.do(SetTimer(Timer.END, grace_s + KILLED_S))

    def ask_for_store(self) -> None:
        """Ask a node to host the ranks' store, if there is none."""
        if self._job.store.is_up or self._job.store.asked >= 0:
            return
        if not self._spec.joins and self._job.formed and not self._roster.is_full:
            return  # a node that has yet to come may host the one that the ranks have
        nodes = {node.node: node for node in self._roster.members}
        if not nodes:
            return
        # Where there was one before: its agent ends the old one when it starts the new.
        node = nodes[self._job.store.last if self._job.store.last in nodes else min(nodes)]
        serial = self._job.store.ask(node.node)
        self._job.do(Send(node.connection, p.HostStore(serial=serial, port=self._spec.master_port)))

    def start_missing(self) -> None:
        """Start every rank that has no process, once the store is there (at first: all nodes)."""
        if self._job.incidents.undecided or not self._roster.any_is(Status.ABSENT):
            return
        self.ask_for_store()
        if not self._job.store.is_up or not (self._roster.is_full or self._job.formed):
            return
        nodes = self._roster.nodes
        absent = [rank for rank in self._roster.those(Status.ABSENT) if rank.node in nodes]
        for number, ranks in group_by_node(absent).items():
            self._spawn(number, ranks)
        if absent:
            self._job.do(SetTimer(Timer.JOIN, self._spec.policy.join_timeout_s))

    def start_outside(self, nodes: Iterable[int]) -> None:
        """Start the ranks of nodes outside the world while it trains.

        Only a Session can take them in; other scripts have to wait for a restart.
        """
        if self._job.phase is not Phase.TRAINING:
            return
        for node in nodes:
            if self._roster.node_is(node, Status.ABSENT):
                self._spawn(node, self._roster.ranks_of(node))
                self._job.do(SetTimer(Timer.COME, self._spec.policy.join_timeout_s))

    def tell_nodes(self, message: p.Message) -> None:
        """Send one message to all agents of the world."""
        for node in self._roster.members:
            self._job.do(Send(node.connection, message))

    def change_settings(self, **changed: Any) -> None:
        """Change settings of all ranks."""
        self.settings = msgspec.structs.replace(self.settings, **changed)
        self.tell_nodes(self.settings)

    def dismiss_agent(self, node: int, reason: str, *, replaced: bool = False) -> None:
        """Tell an agent to end. Its ranks end with it, and the machine ignores its later messages.

        replaced: another agent replaces it. Its exit status is then 1: Kubernetes replaces no pod
        that ends with status 0.
        """
        agent = self._roster.nodes[node]
        left = journal.NodeLeft(
            node=node, address=agent.address, pid=agent.pid, reason=reason, replaced=replaced
        )
        self._job.record(left)
        self._job.do(Send(agent.connection, p.Bye(status=1 if replaced else 0)))
        self._job.sent_home.add(agent.connection)
        self._injections.lost(self._roster.ranks_of(node))
        self._job.store.node_lost(node)
        self._roster.lose(agent)

    def dismiss_spares(self, host: str) -> None:
        """Tell the spares on an isolated host to end. The engine brings others elsewhere."""
        for connection, spare in list(self._roster.spares.items()):
            if spare.host == host and self._job.isolation.shuts_out(host):
                self._job.do(Send(connection, p.Bye(status=1)))
                self._job.sent_home.add(connection)
                self.on_spare_lost(connection)

    def on_spare_lost(self, connection: int) -> None:
        """A spare is gone: training does not notice, unless it was to take a place."""
        lost = self._roster.lose_spare(connection)
        if lost is None or self._job.phase in ENDING:
            return
        spare, promised = lost
        left = len(self._roster.free_spares)
        self._job.record(journal.SpareLost(address=spare.address, pid=spare.pid, left=left))
        for node in promised:
            self.fill(node)
        self.spares_lost += 1
        if not promised and self.spares_lost <= self._spec.policy.max_recoveries:
            self._job.record(journal.NodeWanted(node=SPARE))

    def let_in(self, node: int) -> bool:
        """Take a node into the world if no rank trains; return whether it was."""
        waits = self._job.phase is Phase.REGROUPING and bool(self._roster.missing)
        begins = self._job.phase is Phase.GATHERING and self._roster.all_are(Status.ABSENT)
        if self._roster.node_is(node, Status.ABSENT) and (waits or begins):
            self._roster.take_in(node)
            return True
        return False

    def take_in(self) -> None:
        """Take the nodes into the world whose ranks have all arrived."""
        for node in self._roster.arrived_outside:
            self._roster.take_in(node)
            self._job.newcomers.add(node)

    def fall_back_on_standby(self) -> None:
        """Take in waiting nodes if others are missing, or too few are left."""
        for node in self._roster.standby:
            if self._roster.missing or len(self._roster.members) < self._spec.least_nodes:
                self._roster.take_in(node)
