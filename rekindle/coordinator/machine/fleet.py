"""Agents and processes: spares, starts, kills and dismissals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rekindle.coordinator.machine.inheritance import Placement
from rekindle.coordinator.machine.injections import Injections
from rekindle.coordinator.machine.job_state import ENDING, JobState, Phase, Send, SetTimer, Timer
from rekindle.coordinator.machine.roster import GONE, Node, Rank, Status, group_by_node
from rekindle.names import KILLED_S, SPARE
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import LATE_S

# Time between the first request for an agent and the second one. Each further pause is twice as
# long. An agent may end before it joins, and then only the engine knew its process. An engine does
# nothing about a repeated request while the agent that it started is on its way.
ASK_AGAIN_S = LATE_S


class Fleet:
    """Finds agents for nodes, starts and ends ranks, and requests the ranks' store.

    placements: the agents that each node has had. to_reset: ranks whose device is reset before they
    start. resetting: ranks whose device is being reset.

    spares_lost: number of lost nodes in reserve. late_passed: whether the time limit for late nodes
    has passed. settings: the settings of all ranks.
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
        self.spares_lost = 0  # limited, because the cause of the losses may persist
        self.late_passed = False
        self.settings = settings
        self._pause_s = ASK_AGAIN_S  # before the next repeated request

    def promote(self) -> None:
        """Ask spares to become the vacant nodes. A lost node comes before a planned move."""
        for node in sorted(self._roster.vacant - self._roster.promised.keys()):
            spare = self._roster.spare_for(node)
            moves = self._roster.prepared.keys() - self._roster.vacant
            if spare is None and moves:
                spare = self.release(max(moves))
            if spare is not None:
                self._roster.promised[node] = spare
                if spare not in self._roster.clearing:
                    self._job.do(Send(spare, p.Promote(node=node)))

    def release(self, node: int) -> int:
        """End the ranks of a node on the spare that prepared them. Return the spare.

        It becomes another node or prepares another move when they have ended.
        """
        spare = self._roster.prepared.pop(node)
        ranks = self._roster.numbers_of([node])
        self._roster.clearing[spare] = set(ranks)
        self._job.do(Send(spare, p.Kill(ranks=ranks)))
        self._job.do(SetTimer(Timer.PREPARE, self._spec.policy.join_timeout_s))
        return spare

    def release_prepared(self) -> None:
        """Release all prepared spares, because no rank from before a restart can join."""
        for node in self._roster.prepared.keys() - self._roster.promised.keys():
            self.release(node)

    def on_cleared(self, connection: int) -> None:
        """Promote a spare whose prepared ranks have ended, if a node waits for it."""
        del self._roster.clearing[connection]
        for node, taker in self._roster.promised.items():
            if taker == connection:
                self._job.do(Send(connection, p.Promote(node=node)))

    def fill(self, node: int) -> None:
        """Find an agent for a node without one: a spare, or a new agent from the engine."""
        self._roster.vacant.add(node)
        self.promote()
        by_spare = node in self._roster.promised
        self._job.record(journal.NodeWanted(node=SPARE if by_spare else node))
        self._pause_s = ASK_AGAIN_S
        self._job.do(SetTimer(Timer.WANTED, self._pause_s))

    def ask_again(self, now: float) -> None:
        """Repeat the requests for agents that did not join."""
        awaited = sorted(self._roster.vacant - self._roster.promised.keys())
        for node in awaited:
            self._job.record(journal.NodeWanted(node=node))
        if awaited:
            self._pause_s *= 2
            self._job.do(SetTimer(Timer.WANTED, self._pause_s))

    def fill_all(self) -> None:
        """Request the nodes that did not join: their launcher may not have started them."""
        for node in self._roster.missing:
            if node not in self._roster.vacant:  # a vacant node was requested when it was lost
                self.fill(node)

    def _spawn(self, node: int, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.status = Status.SPAWNING
        reset = tuple(rank.rank for rank in ranks if rank.rank in self.to_reset)
        self.to_reset -= set(reset)
        self.resetting |= set(reset)
        spawn = self.spawn_order(node, ranks, reset)
        self._job.do(Send(self._roster.nodes[node].connection, spawn))

    def spawn_order(self, node: int, ranks: list[Rank], reset: tuple[int, ...] = ()) -> p.Spawn:
        """Return the order to start ranks of a node."""
        outside = 0 if ranks[0].inside else self._spec.processes_per_node
        return p.Spawn(
            generation=self._job.generation + 1,
            restart=self._job.restarts,
            ranks=tuple(rank.rank for rank in ranks),
            store_host=self._job.store.host,
            store_port=self._job.store.port,
            world_size=self._roster.world_size + outside,
            first=self._roster.place_of(self._roster.ranks_of(node)[0]),
            reset=reset,
            placements=max(1, len(self.placements.get(node, ()))),
            joins_running_ranks=self._job.formed
            and any(rank.goes_on for rank in self._roster.world),
        )

    def kill(self, ranks: list[Rank], grace_s: float, *, last: bool = False) -> None:
        """End these ranks: SIGTERM, then SIGKILL after `grace_s`; 0: only SIGKILL.

        last: the job ends, so they do not start again.
        """
        nodes = self._roster.nodes
        alive = [rank for rank in ranks if rank.node in nodes and rank.status not in GONE]
        for number, doomed in group_by_node(alive).items():
            numbers = tuple(rank.rank for rank in doomed)
            order = p.Kill(ranks=numbers, grace_s=grace_s, last=last)
            self._job.do(Send(nodes[number].connection, order))
            for rank in doomed:
                rank.status = Status.ENDING
        if alive:
            self._job.do(SetTimer(Timer.END, grace_s + KILLED_S))

    def ask_for_store(self) -> None:
        """Ask a node to host the ranks' store, if the job does not have one."""
        if self._job.store.is_up or self._job.store.asked >= 0:
            return
        if not self._spec.can_join and self._job.formed and not self._roster.is_full:
            return  # a missing node may host the store that the ranks have
        nodes = {node.node: node for node in self._roster.members}
        if not nodes:
            return
        # The node of the earlier store: its agent ends the old store when it starts the new one.
        node = nodes[self._job.store.last if self._job.store.last in nodes else min(nodes)]
        serial = self._job.next_serial()
        self._job.store.ask(node.node, serial)
        self._job.do(Send(node.connection, p.HostStore(serial=serial, port=self._spec.master_port)))

    def start_missing(self) -> None:
        """Start every rank without a process, after the store is up.

        The first start also requires all nodes.
        """
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

        Only a script with a Session can take them in. Other scripts must wait for a restart.
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
        """Dismiss an agent. Its ranks end with it, and the machine ignores its later messages.

        replaced: another agent replaces it. Its exit status is then 1, because Kubernetes does not
        replace a pod that ends with status 0.
        """
        agent = self.vacate(node, reason, replaced=replaced)
        self._job.send_home(agent.connection, p.EndAgent(status=1 if replaced else 0))

    def hand_over(self, node: int, reason: str) -> Node:
        """Take the place of a node from its agent, whose ranks all wait, and return the agent."""
        self._injections.give_back(self._roster.ranks_of(node))
        return self.vacate(node, reason, replaced=True)

    def vacate(self, node: int, reason: str, *, replaced: bool = False) -> Node:
        """Take the place of a node from its agent, and return the agent."""
        agent = self._roster.nodes[node]
        left = journal.NodeLeft(
            node=node, address=agent.address, pid=agent.pid, reason=reason, replaced=replaced
        )
        self._job.record(left)
        self._injections.lost(self._roster.ranks_of(node))
        self._job.store.node_lost(node)
        self._roster.lose(agent)
        return agent

    def dismiss_spares(self, host: str) -> None:
        """Dismiss the spares on an isolated host. The engine starts others on other hosts."""
        for connection, spare in list(self._roster.spares.items()):
            if spare.host == host and self._job.isolation.shuts_out(host):
                self._job.send_home(connection, p.EndAgent(status=1))
                self.on_spare_lost(connection)

    def on_spare_lost(self, connection: int) -> bool:
        """Handle the loss of a spare. Find other agents for the nodes that it was to become.

        Return whether the coordinator has requested another spare.
        """
        lost = self._roster.lose_spare(connection)
        if lost is None or self._job.phase in ENDING:
            return False
        spare, promised = lost
        left = len(self._roster.free_spares)
        self._job.record(journal.SpareLost(address=spare.address, pid=spare.pid, left=left))
        for node in promised:
            self.fill(node)
        self.spares_lost += 1
        asked = not promised and self.spares_lost <= self._spec.policy.max_recoveries
        if asked:
            self._job.record(journal.NodeWanted(node=SPARE))
        return asked

    def let_in(self, node: int) -> bool:
        """Take a node into the world if no rank trains. Return whether this was possible."""
        waits = self._job.phase is Phase.REGROUPING and bool(self._roster.missing)
        begins = self._job.phase is Phase.GATHERING and self._roster.all_are(Status.ABSENT)
        if self._roster.node_is(node, Status.ABSENT) and (waits or begins):
            self._roster.take_in(node)
            return True
        return False

    def take_in(self) -> None:
        """Take in the nodes outside the world whose ranks have all arrived."""
        for node in self._roster.arrived_outside:
            self._roster.take_in(node)
            self._job.newcomers.add(node)

    def fall_back_on_standby(self) -> None:
        """Take in waiting nodes if others are missing, or if the world has too few nodes."""
        for node in self._roster.standby:
            if self._roster.missing or len(self._roster.members) < self._spec.least_nodes:
                self._roster.take_in(node)
