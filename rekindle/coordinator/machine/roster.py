"""The agents, the spares and the ranks, as the coordinator knows them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable

import msgspec

from rekindle.job.spec import JobSpec
from rekindle.names import SPARE, WIRE_VERSION
from rekindle.protocol import agent as p
from rekindle.states import StateId


class Status(str, enum.Enum):
    """The status of one rank."""

    ABSENT = "absent"  # no process
    SPAWNING = "spawning"  # its agent has the order to start it
    STARTING = "starting"  # a process before its Session (without a Session: it runs the script)
    LEAVING = "leaving"  # has the order to leave its generation
    WAITING = "waiting"  # has arrived, and waits for a generation
    RESTORING = "restoring"  # loads its state for a formed generation
    TRAINING = "training"
    ENDING = "ending"  # the agent is ending it on the coordinator's order
    EXITED = "exited"  # ended with exit status 0


GONE = (Status.ABSENT, Status.EXITED)
_IN_GENERATION = (Status.TRAINING, Status.RESTORING, Status.LEAVING)


class RankIndex:
    """The ranks of the world by status, and the ranks that have stepped.

    The index changes with every rank, because nearly every message asks for the status of all
    ranks. A loop over all ranks for each message would take time with the square of their number.
    outside: ranks outside the world.
    """

    def __init__(self, world_size: int) -> None:
        self.status: dict[Status, set[int]] = {status: set() for status in Status}
        self.status[Status.ABSENT].update(range(world_size))
        self.stepped: set[int] = set()
        self.outside: set[int] = set()


class Rank:
    """One rank. finished: steps; stepped: whether it has finished one in this generation.

    shard: the number of its shard of the training state; None: it has the complete state, or it is
    unknown.
    """

    __slots__ = ("_index", "_status", "arrived", "finished", "node", "pid", "rank", "shard")

    def __init__(self, rank: int, node: int, index: RankIndex) -> None:
        self.rank = rank
        self.node = node
        self.pid = 0
        self.shard: int | None = None
        self.arrived: p.Arrived | None = None
        self.finished = 0
        self._status = Status.ABSENT
        self._index = index

    @property
    def status(self) -> Status:
        """Return its status."""
        return self._status

    @status.setter
    def status(self, status: Status) -> None:
        if self.inside:
            self._index.status[self._status].remove(self.rank)
            self._index.status[status].add(self.rank)
        self._status = status

    @property
    def goes_on(self) -> bool:
        """Return whether its process has been in a generation. A process that waits may be new."""
        known = self.arrived is not None and self.arrived.finished is not None
        return self._status in _IN_GENERATION or (self._status is Status.WAITING and known)

    @property
    def inside(self) -> bool:
        """Return whether it is in the world."""
        return self.rank not in self._index.outside

    @inside.setter
    def inside(self, inside: bool) -> None:
        if inside == self.inside:
            return
        self.stepped = False
        if inside:
            self._index.outside.remove(self.rank)
            self._index.status[self._status].add(self.rank)
        else:
            self._index.status[self._status].remove(self.rank)
            self._index.outside.add(self.rank)

    @property
    def stepped(self) -> bool:
        """Return whether it has finished a step in this generation."""
        return self.rank in self._index.stepped

    @stepped.setter
    def stepped(self, stepped: bool) -> None:
        if stepped:
            self._index.stepped.add(self.rank)
        else:
            self._index.stepped.discard(self.rank)


class Node(msgspec.Struct, kw_only=True):
    """One agent. checkpoints, snapshots: states that its node can restore.

    node: its node rank, or SPARE. host: the machine's name. copies: snapshots of ranks of other
    nodes. replica_port: the port that serves them. committing: the step of the checkpoint that it
    commits, or -1. own: the states of which it has the part that each rank shares with no other,
    if it has left its place.
    """

    node: int
    connection: int
    address: str
    pid: int
    checkpoints: tuple[StateId, ...] = ()
    snapshots: dict[int, tuple[StateId, ...]] = {}
    copies: dict[int, tuple[StateId, ...]] = {}
    replica_port: int = 0
    host: str = ""
    committing: int = -1
    own: dict[int, tuple[StateId, ...]] = {}


class Roster:
    """The nodes that joined, the spares, and every rank of the full world.

    The world of a generation may be smaller.

    outside: nodes outside the world, which were lost or did not join. spares: by connection.
    vacant: node ranks without an agent, which a spare may become.

    promised: by node rank, the connection of the spare that was asked to become the node.
    prepared: by node rank, the connection of the spare that starts the ranks of the node, which
    still has another agent. clearing: by connection of a spare, the live ranks that it prepared in
    vain. leaving: by connection, agents that a prepared spare has replaced.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.nodes: dict[int, Node] = {}
        self.spares: dict[int, Node] = {}
        self.outside: set[int] = set()
        self.vacant: set[int] = set()
        self.promised: dict[int, int] = {}
        self.prepared: dict[int, int] = {}
        self.clearing: dict[int, set[int]] = {}
        self.leaving: dict[int, Node] = {}
        self.obstacles: dict[int, str] = {}  # by missing node: why no agent joins
        per_node = spec.processes_per_node
        self.index = RankIndex(spec.world_size)
        self.ranks = [Rank(r, r // per_node, self.index) for r in range(spec.world_size)]
        self._by_connection: dict[int, Node] = {}  # the nodes by their connections
        self._taken = 0  # every node rank below it has an agent

    @property
    def missing(self) -> list[int]:
        """Return the nodes of the world without an agent."""
        places = range(self.spec.nodes)
        return [node for node in places if node not in self.nodes and node not in self.outside]

    @property
    def waiting_nodes(self) -> list[int]:
        """Return the nodes outside the world that have an agent."""
        return sorted(self.outside & self.nodes.keys())

    def node_is(self, node: int, status: Status) -> bool:
        """Return whether every rank of a node has this status."""
        return all(rank.status is status for rank in self.ranks_of(node))

    @property
    def arrived_outside(self) -> list[int]:
        """Return the waiting nodes whose ranks have all arrived."""
        return [node for node in self.waiting_nodes if self.node_is(node, Status.WAITING)]

    @property
    def standby(self) -> list[int]:
        """Return the waiting nodes that can join the world now: none of their ranks is starting."""
        still = (Status.ABSENT, Status.WAITING)
        return [n for n in self.waiting_nodes if any(self.node_is(n, status) for status in still)]

    @property
    def members(self) -> list[Node]:
        """Return the nodes of the world that have their agent."""
        return [node for node in self.nodes.values() if node.node not in self.outside]

    @property
    def is_full(self) -> bool:
        """Return whether every node of the world has its agent."""
        absent = sum(node not in self.nodes for node in self.outside)
        return len(self.nodes) + absent == self.spec.nodes

    @property
    def world(self) -> list[Rank]:
        """Return the ranks of the world, in the order of their places in it."""
        return [rank for rank in self.ranks if rank.inside] if self.outside else self.ranks

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the world."""
        return (self.spec.nodes - len(self.outside)) * self.spec.processes_per_node

    def place_of(self, rank: Rank) -> int:
        """Return the rank's place in the world, or the place that it would have."""
        before = sum(node < rank.node for node in self.outside)
        return rank.rank - before * self.spec.processes_per_node

    def leave_out(self, node: int) -> None:
        """Remove a node from the world."""
        self.outside.add(node)
        for rank in self.ranks_of(node):
            rank.inside = False

    def take_in(self, *nodes: int) -> None:
        """Take nodes into the world. Their ranks get the step of the others."""
        finished = min((rank.finished for rank in self.world), default=0)
        self.outside -= set(nodes)
        for rank in (rank for node in nodes for rank in self.ranks_of(node)):
            rank.inside = True
            rank.finished = finished

    def may_be_left_out(self, sick: int = SPARE) -> int:
        """Return the number of nodes without the missing ones; 0: too few, or none is missing.

        A node that a spare becomes is not missing, and waiting nodes count. sick: a node that is
        also left out, although it has its agent.
        """
        left = len(self.members) + len(self.promised.keys() - self.outside) + len(self.standby)
        left -= any(member.node == sick for member in self.members)
        return left if self.spec.least_nodes <= left < self.spec.nodes else 0

    def ranks_of(self, node: int) -> list[Rank]:
        """Return the ranks of one node."""
        per_node = self.spec.processes_per_node
        return self.ranks[node * per_node : (node + 1) * per_node]

    def numbers_of(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers of the ranks of these nodes."""
        return tuple(rank.rank for node in nodes for rank in self.ranks_of(node))

    def owns(self, node: int, ranks: Iterable[int]) -> bool:
        """Return whether all of these ranks belong to this node."""
        first = node * self.spec.processes_per_node
        own = range(first, first + self.spec.processes_per_node)
        return all(map(own.__contains__, ranks))

    def all_are(self, *statuses: Status) -> bool:
        """Return whether every rank of the world has one of these statuses."""
        return sum(len(self.index.status[status]) for status in statuses) == self.world_size

    def any_is(self, status: Status) -> bool:
        """Return whether any rank of the world has this status."""
        return bool(self.index.status[status])

    def those(self, *statuses: Status) -> list[Rank]:
        """Return the ranks of the world with one of these statuses, sorted."""
        numbers = sorted(rank for status in statuses for rank in self.index.status[status])
        return [self.ranks[number] for number in numbers]

    def any_outside_but(self, *statuses: Status) -> bool:
        """Return whether any rank outside the world has another status than these."""
        return any(self.ranks[r].status not in statuses for r in self.index.outside)

    @property
    def all_stepped(self) -> bool:
        """Return whether every rank of the world has finished a step in this generation."""
        return len(self.index.stepped) == self.world_size

    def by_connection(self, connection: int) -> Node | None:
        """Return the node whose agent is on this connection."""
        return self._by_connection.get(connection)

    def knows(self, connection: int) -> bool:
        """Return whether this connection belongs to an admitted agent."""
        others = connection in self.spares or connection in self.leaving
        return others or connection in self._by_connection

    def prepares(self, connection: int) -> int | None:
        """Return the node whose ranks the spare on this connection starts, or None."""
        return next((node for node, spare in self.prepared.items() if spare == connection), None)

    def former(self, node: int) -> Node | None:
        """Return the agent from which a node has moved, as long as it lives."""
        return next((agent for agent in self.leaving.values() if agent.node == node), None)

    def agents(self) -> list[Node]:
        """Return all agents: nodes, spares, and agents that leave."""
        return [*self.nodes.values(), *self.spares.values(), *self.leaving.values()]

    @property
    def free_spares(self) -> list[int]:
        """Return the connections of the spares that were not asked to become a node."""
        taken = {*self.promised.values(), *self.prepared.values()}
        return [spare for spare in self.spares if spare not in taken]

    def spare_for(self, node: int) -> int | None:
        """Return the spare that becomes this node: the prepared one, or a free one."""
        if node in self.prepared:
            return self.prepared[node]
        return min(self.free_spares, key=self.clearing.__contains__, default=None)

    def admit(self, agent: Node) -> None:
        """Add an agent as a node or as a spare."""
        if agent.node == SPARE:
            self.spares[agent.connection] = agent
            return
        self.spares.pop(agent.connection, None)
        self.promised.pop(agent.node, None)
        if self.prepared.get(agent.node) == agent.connection:
            del self.prepared[agent.node]
        self.obstacles.pop(agent.node, None)
        self.vacant.discard(agent.node)
        self.nodes[agent.node] = self._by_connection[agent.connection] = agent

    def lose_spare(self, connection: int) -> tuple[Node, list[int]] | None:
        """Remove a spare. Return it, with the nodes that it was asked to become, or None."""
        spare = self.spares.pop(connection, None)
        if spare is None:
            return None
        self.clearing.pop(connection, None)
        promised = [node for node, taker in self.promised.items() if taker == connection]
        for node in promised:
            del self.promised[node]
        self.prepared = {node: own for node, own in self.prepared.items() if own != connection}
        return spare, promised

    def assign_node_rank(self, connection: int, hello: p.Hello, attempt: int) -> int | str:
        """Return the node rank of an agent (or SPARE), or why the agent is refused."""
        spec = self.spec
        wanted = (
            ("wire version", hello.version, WIRE_VERSION),
            ("job", hello.job_id, spec.job_id),
            ("attempt", hello.attempt, attempt),
            ("processes per node", hello.processes, spec.processes_per_node),
        )
        for what, theirs, ours in wanted:
            if theirs != ours:
                return f"the agent's {what} is {theirs!r}, the job's is {ours!r}"
        named = (*hello.ranks_named, *hello.ended, *hello.copies)
        if any(not 0 <= rank < spec.world_size for rank in named):
            return "the agent named ranks that the job does not have"
        node = self.by_connection(connection)
        if node is not None:
            return f"the agent is node {node.node} already"
        if hello.node >= spec.nodes:
            return f"node rank {hello.node} does not exist in a job of {spec.nodes} nodes"
        if hello.prepared:
            return SPARE
        if hello.node >= 0:
            if hello.node not in self.nodes:
                return hello.node
            if not hello.spare or hello.ranks:
                return (
                    f"another agent is node {hello.node}; an agent without a node rank waits as "
                    "a spare"
                )
            if self.promised.get(hello.node) == connection:
                del self.promised[hello.node]  # another agent has become the node
            return SPARE
        if hello.ranks:
            return "an agent with ranks must send its node rank"
        return SPARE if hello.spare else self._free_place()

    def _free_place(self) -> int:
        """Return the first free node rank, or SPARE if all are taken."""
        while self._taken in self.nodes:
            self._taken += 1
        places = range(self._taken, self.spec.nodes)
        free = (n for n in places if n not in self.nodes and n not in self.promised)
        return next(free, SPARE)

    def owners(self) -> dict[int, list[int]]:
        """Return the ranks that have each shard of the state."""
        found: dict[int, list[int]] = {}
        for rank in self.ranks:
            found.setdefault(rank.shard or 0, []).append(rank.rank)
        return found

    def copies(self) -> dict[int, tuple[tuple[int, StateId], ...]]:
        """Return the replicas of each rank's snapshots on other nodes: (node, state)."""
        found: dict[int, tuple[tuple[int, StateId], ...]] = {}
        for number, node in self.nodes.items():
            for rank, kept in node.copies.items():
                found[rank] = (*found.get(rank, ()), *((number, state) for state in kept))
        return found

    def rank_addresses(self) -> tuple[tuple[str, int], ...]:
        """Return the addresses at which ranks reach each other; empty: some ports are missing."""
        ports = [rank.arrived.port if rank.arrived else 0 for rank in self.world]
        if not all(ports):
            return ()
        hosts = (self.nodes[rank.node].address for rank in self.world)
        return tuple(zip(hosts, ports, strict=True))

    def different_source(self, newcomers: set[int]) -> tuple[Rank, Rank, str] | None:
        """Return two ranks of the world with different texts of a file, and the file; or None.

        The first rank has a text that only newcomers have, or that fewer ranks have. A file that
        only some ranks have loaded does not differ.
        """
        world = self.world
        one = next((rank for rank in world if rank.node not in newcomers), world[0])
        first = one.arrived.sources if one.arrived else {}
        texts: dict[str, dict[str, list[Rank]]] = {}
        for rank in world:
            sources = rank.arrived.sources if rank.arrived else {}
            if sources != first or rank is one:
                for file, digest in sources.items():
                    texts.setdefault(file, {}).setdefault(digest, []).append(rank)
        different = {file: found for file, found in texts.items() if len(found) > 1}
        if not different:
            return None
        file = min(different)
        # In `texts`, `one` stands alone for the ranks with its sources.
        common = Counter(rank.arrived.sources.get(file) for rank in world if rank.arrived)
        old = {d for d, own in different[file].items() if any(r.node not in newcomers for r in own)}
        by_number = sorted(different[file], key=lambda digest: (digest in old, common[digest]))
        return different[file][by_number[0]][0], different[file][by_number[-1]][0], file

    def lose(self, node: Node) -> int:
        """Remove a node and its ranks' processes. Return the most steps that a rank finished."""
        del self.nodes[node.node], self._by_connection[node.connection]
        self._taken = min(self._taken, node.node)
        lost = self.ranks_of(node.node)
        for rank in lost:
            rank.status, rank.pid, rank.arrived = Status.ABSENT, 0, None
        return max(rank.finished for rank in lost)


def group_by_node(ranks: Iterable[Rank]) -> dict[int, list[Rank]]:
    """Group ranks by their node."""
    found: dict[int, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return found
