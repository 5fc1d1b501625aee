"""The first layer of the coordinator's mind: who is there, and what is missing to begin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable

from rekindle.coordinator.machine.injections import Injections
from rekindle.coordinator.machine.isolated_hosts import Isolation
from rekindle.coordinator.machine.job_state import (
    ENDING,
    CancelTimer,
    Command,
    Incidents,
    Phase,
    Record,
    Send,
    SetTimer,
    Store,
)
from rekindle.coordinator.machine.ranks import Rank, Status, by_node
from rekindle.coordinator.machine.roster import Node, Roster
from rekindle.coordinator.machine.sharded_checkpoints import Assembly
from rekindle.coordinator.machine.takeover import Earlier, Inheritance, interval_of
from rekindle.job.spec import JobSpec
from rekindle.names import SPARE
from rekindle.protocol import agent as p
from rekindle.recovery.faults.classification import Judge
from rekindle.recovery.faults.fault import Fault, Kind
from rekindle.recovery.faults.health_events import SignBook
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.decide import Decision
from rekindle.recovery.policy.plan import Made, Plan, Source
from rekindle.recovery.policy.policy import LATE_S, Strategy

# As `LATE_S`, where a coordinator takes a dead one's place: some agents may have died with it.
TAKEN_OVER_LATE_S = 5.0
_NOTHING = Earlier()


class Gathering(ABC):
    """Agents, the ranks' store, and the start of ranks.

    tables: gives the tables of faults. earlier: what earlier attempts have left.
    """

    _doubted: tuple[Fault, ...] = ()  # not decided yet: a sign may tell more of them
    _asked = False  # for those that had not come
    _at_once = False  # the job is stopped without grace
    _devices = False  # a node has devices of which signs may tell
    _planned: Plan | None = None  # of the generation formed last
    _healing: frozenset[int] = frozenset()  # ranks that were told to start with a healed device

    def __init__(
        self,
        spec: JobSpec,
        tables: Callable[[], Judge],
        *,
        attempt: int = 0,
        earlier: Earlier = _NOTHING,
    ) -> None:
        self.spec = spec
        self._tables = tables
        self._signs = SignBook(earlier.signs, earlier.at)
        self.attempt = attempt
        self.phase = Phase.GATHERING
        self.generation = earlier.generation
        self._suspicions = list(earlier.suspicions)
        self.roster = Roster(spec)
        self.incidents = Incidents(spec.policy, earlier.incident, earlier.past)
        self._placements = {node: set(each) for node, each in earlier.placements.items()}
        self.newest = 0
        self.total = 0
        self._reached = 0  # steps that every rank had finished when the open incident began
        self.restarts = 0
        self._store = Store()
        self._session = False  # a rank of the current generation has a Session
        self._sessions_seen = False  # one of this attempt had
        self._formed = False  # a generation was formed since the last restart
        self._left_early = 0  # nodes that were lost before any rank was started
        self._spares_lost = 0  # so far; whoever kills them may not be done
        self._resumed = 0  # the step after which all ranks last began to train together
        self._awaiting: tuple[Fault, Decision] | None = None  # a person's approval
        self._held_faults: list[Fault] = []  # seen meanwhile
        self._to_heal: set[int] = set()  # ranks whose device is healed before they start
        self._inherits = False  # a coordinator of this attempt died before
        self._taken_over = False  # from a coordinator that died, with ranks in a Session
        self._stop_reason = ""
        self._assembly = Assembly()
        self._interval = interval_of(spec, earlier)
        self._profile, self._traced = earlier.profile, earlier.traced
        self._committing: set[int] = set()  # nodes that were told to commit a checkpoint
        self._dumpers: set[int] = set()  # the nodes that write last words
        self._dumping = 0  # the step that it was asked for
        self._said = ""  # what became of last words
        self._speechless: set[int] = set()  # nodes that could not
        self._outcome = "stopped"
        self._refused: set[tuple[int, Source, Made]] = set()  # (node, source, state) that failed
        self._injections = Injections()
        self._isolation = Isolation(spec.keeps_off)
        self._late_passed = False  # whoever is to come had the time for it
        self._held = 0  # the generation that is being held, for the world to grow
        self._tries: Counter[int] = Counter()  # how often a node was put out again
        self._newcomers: set[int] = set()  # nodes taken in that have not done a step yet
        self.sent_home: set[int] = set()  # lines of agents that were told to end
        self._commands: list[Command] = []

    def drain(self) -> list[Command]:
        """Return the commands since the last call."""
        commands, self._commands = self._commands, []
        return commands

    def start(self, inherited: Inheritance | None = None) -> None:
        """Wait for the nodes: new ones, or those of a coordinator that died."""
        self._do(SetTimer("late", TAKEN_OVER_LATE_S if inherited else LATE_S))
        if inherited is not None:
            self._inherits = True
            self.restarts = inherited.restarts
            self._resumed, self.newest = inherited.resumed, inherited.newest
            if inherited.incident is not None:
                self.incidents.inherit(inherited.incident)
            self._to_heal = set(inherited.to_heal)
            self._isolation.add(inherited.isolated, inherited.leaving)
            self._awaiting, self._held_faults = inherited.awaiting, list(inherited.held)
            if self._awaiting is not None:
                self._do(SetTimer("approval", self.spec.policy.approval_timeout_s))
            for node in inherited.left_out:
                self.roster.leave_out(node)
            if inherited.stopping is not None:
                # Agents that come now are refused, and end their ranks; late ones do so later.
                self.phase, self._stop_reason = Phase.STOPPING, inherited.stopping.reason
                self._outcome = inherited.stopping.outcome
        self._do(SetTimer("node", self.spec.policy.node_timeout_s))

    def on_hello(self, connection: int, hello: p.Hello) -> None:
        """An agent asks to be taken in."""
        ending = self.phase in ENDING
        if not ending and self._shuts_out(connection, hello):
            return
        seat = "the job is ending" if ending else self.roster.seat(connection, hello, self.attempt)
        restarting = self.phase is Phase.RESTARTING
        if hello.ranks and (restarting or hello.restart < self.restarts):
            seat = "all ranks are started anew, and this agent has some of before"
        if isinstance(seat, str):
            self._do(Send(connection, p.Refused(reason=seat)))
            return
        agent = Node(
            node=seat,
            connection=connection,
            address=hello.address,
            pid=hello.pid,
            checkpoints=hello.checkpoints,
            snapshots=hello.snapshots,
            copies=hello.copies,
            depot=hello.depot,
            host=hello.host,
        )
        self._devices = self._devices or hello.devices
        for rank, shard in hello.shards.items():
            self.roster.ranks[rank].shard = shard
        self.roster.sit(agent)
        self._isolation.came(seat)
        self._do(Send(connection, p.Welcome(node=seat)))
        agents = self._placements.setdefault(seat, set())
        agents.add((self.attempt, hello.address, hello.pid))
        self._record(
            journal.NodeJoined(node=seat, address=hello.address, pid=hello.pid, host=hello.host)
        )
        if seat == SPARE:
            for node, taker in self.roster.promised.items():
                if taker == connection:  # it could not hear of it while it wanted another place
                    self._do(Send(connection, p.Promote(node=node)))
            self._promote()
            return
        if seat in self.roster.outside and not self._let_in(seat):
            self._on_come_back(seat, hello)
            return
        self._take_over(connection, hello)
        if self.roster.is_full:
            self._do(CancelTimer("node"))
            if self.phase in (Phase.GATHERING, Phase.REGROUPING):
                self._start_missing()
        elif self._late_passed and len(self.roster.nodes) >= self.spec.least_nodes:
            self._go_on_without_missing()

    def _shuts_out(self, connection: int, hello: p.Hello) -> bool:
        """Refuse what comes from an isolated host; have another looked for, if that can help."""
        if not self._isolation.refuses(hello):
            return False
        self._do(Send(connection, p.Refused(reason=f"host {hello.host} is isolated")))
        unpromised = set(self.roster.missing) - self.roster.promised.keys()
        awaited = self._isolation.refused(hello.host, unpromised)
        self._record(journal.NodeWanted(node=min(awaited, default=SPARE)))
        if awaited and self._isolation.just_in_vain(hello.host):
            why = f"whatever comes, comes from a host that is isolated, as {hello.host}"
            self.roster.obstacles |= dict.fromkeys(awaited, why)
            self._do(SetTimer("node", 0.0))
        return True

    def _promote(self) -> None:
        """Ask spares to take the places that are vacant."""
        free = self.roster.free_spares
        places = sorted(self.roster.vacant - self.roster.promised.keys()) if free else []
        for node, spare in zip(places, free, strict=False):
            self.roster.promised[node] = spare
            self._do(Send(spare, p.Promote(node=node)))

    def _fill(self, node: int) -> None:
        """Find an agent for a node that has none: a spare, or one that the engine brings."""
        self.roster.vacant.add(node)
        self._promote()
        by_spare = node in self.roster.promised
        self._record(journal.NodeWanted(node=SPARE if by_spare else node))

    def _fill_all(self) -> None:
        """Ask for all nodes that did not come: their launcher may have died before it did."""
        for node in self.roster.missing:
            if node not in self.roster.vacant:  # else it was asked for when it was lost
                self._fill(node)

    def _let_in(self, node: int) -> bool:
        """Take a node in at once where that disturbs nobody; say whether it was."""
        waits = self.phase is Phase.REGROUPING and bool(self.roster.missing)
        begins = self.phase is Phase.GATHERING and self.roster.all_are(Status.ABSENT)
        if self.roster.node_is(node, Status.ABSENT) and (waits or begins):
            self.roster.take_in(node)
            return True
        return False

    def _on_come_back(self, node: int, hello: p.Hello) -> None:
        """A node comes that the world goes on without; ranks that it still has are of no use."""
        for live in hello.ranks:
            rank = self.roster.ranks[live.rank]
            rank.pid, rank.status = live.pid, Status.STARTING
        if hello.ranks:
            self._kill(self.roster.ranks_of(node), grace_s=0.0)
        self._start_outside([node])

    def _start_outside(self, nodes: Iterable[int]) -> None:
        """Start the ranks of nodes that came while the world goes on without them.

        Only a Session can take them in; other scripts have to wait for a restart.
        """
        if self.phase is not Phase.TRAINING:
            return
        for node in nodes:
            if self.roster.node_is(node, Status.ABSENT):
                self._spawn(node, self.roster.ranks_of(node))
                self._do(SetTimer("come", self.spec.policy.join_timeout_s))

    def _go_on_without_missing(self) -> None:
        """Leave out the nodes that did not come, if the world may be so small."""
        allowed = not self._formed or Strategy.SHRINK in self.spec.policy.strategies
        left_out = [node for node in self.roster.missing if node not in self.roster.promised]
        regrouping = self.phase in (Phase.GATHERING, Phase.REGROUPING)
        if not (regrouping and allowed and left_out and self.roster.may_be_left_out()):
            return
        for node in left_out:
            self.roster.leave_out(node)
            why = "it did not come in time, and the world goes on without it"
            self._record(journal.NodeLeft(node=node, address="", pid=0, reason=why))
        if self.roster.is_full:
            self._do(CancelTimer("node"))
        self._start_missing()
        self._try_form()

    def _take_over(self, connection: int, hello: p.Hello) -> None:
        """Take over what an agent did for a coordinator that died: its ranks go on living."""
        for number in hello.ended:
            self.roster.ranks[number].status = Status.EXITED
        for live in hello.ranks:
            rank = self.roster.ranks[live.rank]
            rank.pid = live.pid
            rank.status = Status.LEAVING if live.training else Status.STARTING
        if not hello.ranks and not hello.ended:
            return
        self.phase = Phase.REGROUPING
        if hello.store is not None and not self.spec.joins and hello.restart >= self.restarts:
            # The ranks' framework ends them when this store ends, so they need no other one.
            host = self.spec.master_addr or hello.address
            self._store.adopt(hello.node, host, hello.store)
        self.generation = max(self.generation, hello.generation)
        self.restarts = max(self.restarts, hello.restart)
        self._assembly.begin(self.generation)
        if any(live.training for live in hello.ranks):
            # Where their generation stands nobody knows any more: all leave it and meet again.
            self._session = self._sessions_seen = self._formed = True
            self._do(Send(connection, p.Over(generation=hello.generation)))
            self._do(SetTimer("leave", self.spec.policy.leave_timeout_s))
            if self._inherits and not self._taken_over:
                self._taken_over = True
                text = "the coordinator was lost; another one took its place"
                self._on_fault(Fault(kind=Kind.COORDINATOR, message=text))
        if self.roster.all_are(Status.EXITED):
            self._on_good_exit()  # the dead one did not hear of the last end

    def on_store_up(self, node: int, message: p.StoreUp) -> None:
        """The store that ranks meet at listens, or could not."""
        starting = self.phase in (Phase.GATHERING, Phase.REGROUPING)
        if message.serial != self._store.serial or not starting:
            return
        if message.port == 0:
            text = f"the ranks' store could not be started: {message.error}"
            self._on_fault(Fault(kind=Kind.LAUNCH, message=text, node=node))
            return
        host = self.spec.master_addr or self.roster.nodes[node].address
        self._store.came_up(node, host, message.port)
        self._start_missing()
        self._try_form()

    def _ask_for_store(self) -> None:
        if self._store.is_up or self._store.asked >= 0:
            return
        nodes = {node.node: node for node in self.roster.members}
        if not nodes:
            return
        # Where there was one before: its agent ends the old one when it starts the new.
        node = nodes[self._store.last if self._store.last in nodes else min(nodes)]
        serial = self._store.ask(node.node)
        self._do(Send(node.connection, p.HostStore(serial=serial, port=self.spec.master_port)))

    def _start_missing(self) -> None:
        """Start every rank that has no process, once the store is there (at first: all nodes)."""
        undecided = self._awaiting is not None or self._doubted
        if undecided or not self.roster.any_is(Status.ABSENT):
            return
        self._ask_for_store()
        if not self._store.is_up or not (self.roster.is_full or self._formed):
            return
        nodes = self.roster.nodes
        absent = [rank for rank in self.roster.those(Status.ABSENT) if rank.node in nodes]
        for number, ranks in by_node(absent).items():
            self._spawn(number, ranks)
        if absent:
            self._do(SetTimer("join", self.spec.policy.join_timeout_s))

    def _spawn(self, node: int, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.status = Status.SPAWNING
        outside = 0 if ranks[0].inside else self.spec.processes_per_node
        spawn = p.Spawn(
            generation=self.generation + 1,
            restart=self.restarts,
            ranks=tuple(rank.rank for rank in ranks),
            store_host=self._store.host,
            store_port=self._store.port,
            world_size=self.roster.world_size + outside,
            first=self.roster.place_of(self.roster.ranks_of(node)[0]),
            heal=tuple(rank.rank for rank in ranks if rank.rank in self._to_heal),
            placements=max(1, len(self._placements.get(node, ()))),
            joins=self._formed and any(rank.goes_on for rank in self.roster.world),
        )
        self._to_heal -= set(spawn.heal)
        self._healing |= set(spawn.heal)
        self._do(Send(self.roster.nodes[node].connection, spawn))

    def on_spawn_failed(self, node: int, message: p.SpawnFailed) -> None:
        """A rank could not be started at all."""
        text = f"rank {message.rank} could not be started: {message.error}"
        rank = self.roster.ranks[message.rank]
        rank.status = Status.ABSENT
        if not rank.inside:
            self._send_home(node, text)
            return
        # At first it means that ranks cannot run here; later, that the machine is short of room.
        kind = Kind.PROCESS if self._formed else Kind.LAUNCH
        self._on_fault(Fault(kind=kind, message=text, rank=message.rank, node=node))

    def _fault(self, kind: Kind, rank: Rank, text: str, now: float = 0.0) -> Fault:
        return Fault(
            kind=kind,
            message=text,
            rank=rank.rank,
            node=rank.node,
            finished=rank.finished,
            signature=kind.value,
            at=now,
        )

    @abstractmethod
    def _on_good_exit(self) -> None: ...

    @abstractmethod
    def _send_home(self, node: int, reason: str) -> None: ...

    @abstractmethod
    def _kill(self, ranks: list[Rank], grace_s: float) -> None: ...

    @abstractmethod
    def _on_fault(self, fault: Fault) -> None: ...

    @abstractmethod
    def _try_form(self) -> None: ...

    def _do(self, command: Command) -> None:
        self._commands.append(command)

    def _record(self, event: journal.Event) -> None:
        self._commands.append(Record(event))
