"""Admission of new agents: the coordinator checks their nodes, and admits or refuses them."""

from __future__ import annotations

from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.job_state import (
    ENDING,
    CancelTimer,
    JobState,
    Phase,
    Proceed,
    Send,
    SetTimer,
    Timer,
)
from rekindle.coordinator.machine.moves import Moves
from rekindle.coordinator.machine.node_check_run import CheckedAgent, NodeCheckRun
from rekindle.coordinator.machine.recovery import Recovery
from rekindle.coordinator.machine.roster import Node, Status
from rekindle.coordinator.machine.takeover import Takeover
from rekindle.job.spec import KeepsOff
from rekindle.names import SPARE, WIRE_VERSION
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.verdicts import Health, NodeVerdict
from rekindle.recovery.policy.policy import LATE_S, Strategy

# Messages of dlrover-run about such nodes, for users who search their logs for them.
_FAULT_OF = {
    Health.FAULTY: (FaultKind.NODE, "The node is down."),
    Health.STRAGGLER: (FaultKind.STRAGGLER, "The node is a straggler and exits."),
}


class Admission:
    """Admits agents as nodes or spares. It refuses an agent whose node fails the check.

    check: the check of new nodes. Nodes that the job awaits may be among them.
    """

    def __init__(
        self,
        job: JobState,
        fleet: Fleet,
        moves: Moves,
        recovery: Recovery,
        takeover: Takeover,
        proceed: Proceed,
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._moves = moves
        self._recovery = recovery
        self._takeover = takeover
        self._proceed = proceed
        self._roster = job.roster
        self._spec = job.spec
        self._asked = False  # for missing nodes and spares, after a takeover
        # Checks nodes before they join. Without `network_check` no node is checked.
        self.check = NodeCheckRun(job.spec, job.spec.nodes + job.spec.spares, job.do)
        self._hellos: dict[int, p.Hello] = {}  # of agents whose nodes are checked, by connection

    # ---- the check of new nodes

    def on_hello(self, connection: int, hello: p.Hello) -> None:
        """Handle the hello of an agent. If `network_check` is on, check a new node first."""
        if self._spec.network_check and self.is_to_be_checked(connection, hello):
            self._hellos[connection] = hello
            self.check.add(
                CheckedAgent(
                    connection=connection, node=hello.node, host=hello.host, address=hello.address
                )
            )
        else:
            self._admit(connection, hello)

    def on_check_news(self, connection: int, message: p.Message, now: float) -> None:
        """Handle a message of an agent during its check. Only answers have an effect."""
        self.check.on_message(connection, message)
        self._take_verdicts(now)

    def on_gathering_over(self, now: float) -> None:
        """Begin the check after the time limit for further agents."""
        self.check.on_gathering_over()
        self._take_verdicts(now)

    def on_answers_late(self, now: float) -> None:
        """Continue the check after the time limit for answers."""
        self.check.on_answers_late()
        self._take_verdicts(now)

    def on_lost(self, connection: int, now: float) -> bool:
        """Handle the loss of an agent. Return whether its node was being checked."""
        if not self.check.on_lost(connection):
            return False
        del self._hellos[connection]
        self._take_verdicts(now)
        return True

    def _take_verdicts(self, now: float) -> None:
        for judged in self.check.take_judged():
            hello = self._hellos.pop(judged.connection)
            self.on_checked(judged.connection, hello, judged.verdict, now)

    def is_to_be_checked(self, connection: int, hello: p.Hello) -> bool:
        """Return whether an agent is new, and the coordinator would admit it now."""
        spec = self._spec
        theirs = (hello.version, hello.job_id, hello.attempt, hello.processes)
        fits = theirs == (WIRE_VERSION, spec.job_id, self._job.attempt, spec.processes_per_node)
        is_new = not (self._roster.knows(connection) or hello.ranks or hello.ended)
        unwanted = self._job.phase in ENDING or self._job.isolation.refuses(hello)
        return fits and is_new and not unwanted and not hello.unable

    def on_checked(self, connection: int, hello: p.Hello, verdict: NodeVerdict, now: float) -> None:
        """Handle the verdict about an agent's node.

        Admit the agent, or refuse it and isolate its host.
        """
        sick = verdict.health is Health.FAULTY or (
            verdict.health is Health.STRAGGLER and self._spec.exclude_straggler
        )
        fault = _fault(hello, verdict, now) if sick else None
        number = self._job.incidents.aside() if fault else 0
        self._job.record(
            journal.NodeChecked(
                host=hello.host,
                address=hello.address,
                pid=hello.pid,
                verdict=verdict,
                fault=fault,
                incident=number,
            )
        )
        if fault is None or self._job.phase in ENDING:
            self._admit(connection, hello)
            return
        self._job.send_home(connection, p.EndAgent(status=1, refused=fault.message))
        if hello.host:
            self._job.isolation.add([hello.host], [])
            isolated = journal.Isolated(
                incident=number, node=SPARE, host=hello.host, reason=fault.message
            )
            self._job.record(isolated)
        awaited = [node for node in self._roster.missing if node not in self._roster.vacant]
        if self._spec.keeps_off is KeepsOff.ONE_HOST:  # no other agent can come
            self._roster.obstacles |= dict.fromkeys(self._roster.missing, fault.message)
            self._job.do(SetTimer(Timer.NODE, 0.0))
        elif awaited:
            self._fleet.fill(awaited[0])
        else:
            self._job.record(journal.NodeWanted(node=SPARE))

    # ---- nodes come

    def _admit(self, connection: int, hello: p.Hello) -> None:
        ending = self._job.phase in ENDING
        if not ending and self._shuts_out(connection, hello):
            return
        if hello.ranks and (hello.address, hello.pid) in self._job.moved_away:
            why = f"another agent has taken the place of node {hello.node}"
            self._job.do(Send(connection, p.EndAgent(status=1, refused=why)))
            return
        node_rank = (
            "the job is ending"
            if ending
            else self._roster.assign_node_rank(connection, hello, self._job.attempt)
        )
        restarting = self._job.phase is Phase.RESTARTING
        if hello.ranks and (restarting or hello.restart < self._job.restarts):
            node_rank = (
                "the job restarts all ranks, and this agent has ranks from before the restart"
            )
        if isinstance(node_rank, str):
            self._job.do(Send(connection, p.EndAgent(status=1, refused=node_rank)))
        elif hello.unable:
            self._turn_away(connection, hello, node_rank)
        else:
            self._take_in(connection, hello, node_rank)

    def _take_in(self, connection: int, hello: p.Hello, node_rank: int) -> None:
        agent = Node(
            node=node_rank,
            connection=connection,
            address=hello.address,
            pid=hello.pid,
            checkpoints=hello.checkpoints,
            snapshots=hello.snapshots,
            copies=hello.copies,
            replica_port=hello.replica_port,
            host=hello.host,
        )
        self._job.devices = self._job.devices or hello.devices
        self._job.names_session = self._job.names_session or hello.session
        for rank, shard in hello.shards.items():
            self._roster.ranks[rank].shard = shard
        prepared = self._roster.prepared.get(node_rank) == connection
        self._roster.admit(agent)
        self._job.isolation.came(node_rank)
        self._job.do(Send(connection, p.Welcome(node=node_rank)))
        agents = self._fleet.placements.setdefault(node_rank, set())
        agents.add((self._job.attempt, hello.address, hello.pid))
        self._job.record(
            journal.NodeJoined(
                node=node_rank, address=hello.address, pid=hello.pid, host=hello.host
            )
        )
        if hello.prepared:
            self._take_back(connection, hello)
        if node_rank == SPARE:
            for node, taker in self._roster.promised.items():
                if taker == connection:  # it may have missed it while it asked for another node
                    self._job.do(Send(connection, p.Promote(node=node)))
            self._fleet.promote()
            self._moves.advance()
            return
        self._moves.on_joined(agent)
        if node_rank in self._roster.outside and not self._fleet.let_in(node_rank):
            self._on_come_back(node_rank, hello)
            return
        self._takeover.take_over(connection, hello, prepared=prepared)
        if self._roster.is_full:
            self._job.do(CancelTimer(Timer.NODE))
            if self._job.phase in (Phase.GATHERING, Phase.REGROUPING):
                self._fleet.start_missing()
        elif self._fleet.late_passed and len(self._roster.nodes) >= self._spec.least_nodes:
            self._go_on_without_missing()

    def _take_back(self, connection: int, hello: p.Hello) -> None:
        """Take a spare back that has prepared a planned move. It ends if the move is over."""
        if not self._moves.readmit(connection, hello):
            self._job.send_home(connection, p.EndAgent(status=1))
            self._fleet.on_spare_lost(connection)

    def _turn_away(self, connection: int, hello: p.Hello, node: int) -> None:
        """Dismiss an agent that cannot work. A job that has not begun fails with its reason.

        A job that has begun waits for another agent. It reports the reason if no other agent comes.
        """
        self._job.send_home(connection, p.EndAgent(status=1))
        text = f"the agent on {hello.host or hello.address} cannot work: {hello.unable}"
        if node != SPARE and not (self._job.has_begun or self._takeover.inherits):
            fault = Fault(kind=FaultKind.LAUNCH, message=text, node=node, host=hello.host)
            self._recovery.report(fault)
            return
        self._job.record(
            journal.NodeLeft(node=node, address=hello.address, pid=hello.pid, reason=text)
        )
        if node != SPARE:
            self._roster.obstacles[node] = text

    def _shuts_out(self, connection: int, hello: p.Hello) -> bool:
        """Return whether the host of an agent is isolated. Refuse the agent then.

        The coordinator also requests another agent. If only agents of isolated hosts come, it stops
        waiting for the missing nodes.
        """
        if not self._job.isolation.refuses(hello):
            return False
        self._job.do(
            Send(connection, p.EndAgent(status=1, refused=f"host {hello.host} is isolated"))
        )
        unpromised = set(self._roster.missing) - self._roster.promised.keys()
        awaited = self._job.isolation.refused(hello.host, unpromised)
        self._job.record(journal.NodeWanted(node=min(awaited, default=SPARE)))
        if awaited and self._job.isolation.just_in_vain(hello.host):
            why = f"each new node comes from an isolated host, for example {hello.host}"
            self._roster.obstacles |= dict.fromkeys(awaited, why)
            self._job.do(SetTimer(Timer.NODE, 0.0))
        return True

    def _on_come_back(self, node: int, hello: p.Hello) -> None:
        """Handle the return of a node outside the world. End its ranks of an earlier generation."""
        for live in hello.ranks:
            rank = self._roster.ranks[live.rank]
            rank.pid, rank.status = live.pid, Status.STARTING
        if hello.ranks:
            self._fleet.kill(self._roster.ranks_of(node), grace_s=0.0)
        self._fleet.start_outside([node])

    def _go_on_without_missing(self) -> None:
        """Leave out the nodes that did not join, if the policy allows a world without them."""
        allowed = not self._job.formed or Strategy.SHRINK in self._spec.policy.strategies
        left_out = [node for node in self._roster.missing if node not in self._roster.promised]
        regrouping = self._job.phase in (Phase.GATHERING, Phase.REGROUPING)
        if not (regrouping and allowed and left_out and self._roster.may_be_left_out()):
            return
        for node in left_out:
            self._roster.leave_out(node)
            why = "it did not join in time, and the world continues without it"
            self._job.record(journal.NodeLeft(node=node, address="", pid=0, reason=why))
        if self._roster.is_full:
            self._job.do(CancelTimer(Timer.NODE))
        self._fleet.start_missing()
        self._proceed()

    def on_store_up(self, node: int, message: p.StoreUp, now: float) -> None:
        """Handle the start of the ranks' store, or its failure."""
        starting = self._job.phase in (Phase.GATHERING, Phase.REGROUPING)
        asked = (node, message.serial) == (self._job.store.asked, self._job.store.serial)
        if not (asked and starting):
            return
        if message.port == 0:
            text = f"the agent could not start the ranks' store: {message.error}"
            self._recovery.report(Fault(kind=FaultKind.LAUNCH, message=text, node=node))
            return
        host = self._spec.master_addr or self._roster.nodes[node].address
        self._job.store.came_up(node, host, message.port)
        self._fleet.start_missing()
        self._proceed()

    def on_nodes_missed(self, now: float) -> None:
        """Leave out the nodes that did not join, or report that they are missing."""
        self._go_on_without_missing()
        if self._roster.missing:
            where = ", ".join(map(str, self._roster.missing))
            text = f"no agent joined for node {where}"
            if not self._job.isolation.is_in_vain:
                text += f" within {self._spec.policy.node_timeout_s:g} s"
            why = "; ".join(sorted(set(self._roster.obstacles.values())))
            text += f": {why}" if why else ""
            self._recovery.report(Fault(kind=FaultKind.SCHEDULING, message=text, at=now))

    def on_late(self, now: float) -> None:
        """Request the nodes that did not join. Leave them out if the world may shrink.

        A coordinator that takes over first requests these nodes and spares, and waits a second
        time.
        """
        self._fleet.fill_all()
        if self._takeover.inherits and not self._asked:
            self._asked = True
            for _ in range(self._spec.spares - len(self._roster.spares)):
                self._job.record(journal.NodeWanted(node=SPARE))
            self._job.do(SetTimer(Timer.LATE, LATE_S))
            return
        self._fleet.late_passed = True
        self._go_on_without_missing()


def _fault(hello: p.Hello, verdict: NodeVerdict, now: float) -> Fault:
    kind, result = _FAULT_OF[verdict.health]
    where = hello.host or hello.address
    return Fault(
        kind=kind,
        message=f"{result} {where}: {verdict.reason}",
        at=now,
        host=hello.host,
        device=verdict.device,
        signature=kind.value,
    )
