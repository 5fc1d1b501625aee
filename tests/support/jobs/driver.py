"""The coordinator's state machine, driven without I/O: messages in, commands out.

Each test also checks each command against the invariants.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from jobs.checks import Checks, check_counts, check_inherited
from rekindle.coordinator.machine.inheritance import JobHistory, earlier, inheritance
from rekindle.coordinator.machine.job_state import (
    CancelTimer,
    Command,
    End,
    Phase,
    Record,
    Send,
    SetTimer,
    Timer,
)
from rekindle.coordinator.machine.machine import Machine
from rekindle.coordinator.machine.node_check_run import NodeCheckRun
from rekindle.coordinator.machine.roster import Status
from rekindle.job.spec import EntryKind, JobSpec
from rekindle.names import WIRE_VERSION
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import ErrorRecord, Exit, FaultKind
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy

M = TypeVar("M", bound=p.Message)
E = TypeVar("E", bound=journal.Event)

NO_RESTART = Policy(max_restarts=0)

tables = functools.cache(Tables.load)


def spec_of(*, nodes: int, processes: int, **settings: object) -> JobSpec:
    """Return the spec of a job whose paths do not exist."""
    return JobSpec(
        job_id="simulated",
        entry=EntryKind.SCRIPT,
        target="train.py",
        nodes=nodes,
        processes_per_node=processes,
        working_directory="nowhere",
        directory="nowhere",
        log_directory="nowhere",
        checkpoint_store="nowhere",
        **settings,
    )


class Driver:
    """One state machine, and the state that its agents would have.

    `commands`: the commands after the last event.
    `timers`: the running timers.
    """

    def __init__(
        self,
        *,
        nodes: int = 1,
        processes: int = 2,
        policy: Policy | None = None,
        attempt: int = 0,
        generation: int = 0,
        least: int = 0,
        **settings: object,
    ) -> None:
        spec = spec_of(
            nodes=nodes,
            processes=processes,
            policy=policy or NO_RESTART,
            min_nodes=least,
            **settings,
        )
        self._tables = functools.partial(tables, None, spec.policy.dialect)
        self.machine = Machine(
            spec, self._tables, attempt=attempt, earlier=JobHistory(generation=generation)
        )
        self.now = 1000.0
        self.commands: list[Command] = []
        started = journal.JobStarted(
            job_id=spec.job_id, attempt=attempt, nodes=nodes, processes_per_node=processes, pid=1
        )
        self.history: list[journal.Event] = [started]
        self.timers: dict[str, float] = {}
        self.outcome: bool | None = None
        self.nodes: dict[int, int] = {}  # node to connection
        self.pids: dict[int, int] = {}  # rank to the process id that its agent has
        self.stores: list[tuple[int, p.HostStore]] = []
        self.unstarted: list[tuple[int, p.Spawn]] = []
        self.doomed: list[int] = []
        self.examinations: list[tuple[int, ...]] = []
        self.names_session = False  # whether agents report that the script names Rekindle
        self._check: NodeCheckRun | None = None  # the newest check of slow nodes
        self.promotions: list[tuple[int, int]] = []  # spares that are promoted: connection and node
        self._checks = Checks(self.machine.job.generation)
        self._connections = 0
        self.machine.takeover.start()
        self.collect()

    @property
    def phase(self) -> Phase:
        return self.machine.job.phase

    @property
    def ranks(self) -> range:
        return range(self.machine.job.spec.world_size)

    def status(self, rank: int) -> Status:
        return self.machine.job.roster.ranks[rank].status

    def node_of(self, rank: int) -> int:
        return rank // self.machine.job.spec.processes_per_node

    def lose_coordinator(self) -> None:
        """Replace the coordinator. The new one starts from the journal, without agents."""
        old, events = self.machine, self.history
        before, left = earlier(events), inheritance(events, old.job.attempt)
        check_inherited(old, before, left)
        self.machine = Machine(old.job.spec, self._tables, attempt=old.job.attempt, earlier=before)
        self.nodes, self.timers, self.stores, self.unstarted = {}, {}, [], []
        self._checks.forget_arrivals()
        self.machine.takeover.start(left)
        self.collect()

    # ---- outputs

    def collect(self) -> None:
        """Take the commands of the state machine, check them, and store the orders for agents."""
        self.commands = self.machine.job.drain()
        check = self.machine.stragglers.check
        if check is not self._check and self.machine.stragglers.checked:
            self.examinations.append((*self.machine.stragglers.checked.values(),))
        self._check = check
        check_counts(self.machine.job.roster)
        for command in self.commands:
            self._checks.command(command, {c: n for n, c in self.nodes.items()})
            match command:
                case Send(connection, p.Promote(node=node)):
                    self.promotions.append((connection, node))
                case Send(connection, message):
                    self.deliver_to(connection, message)
                case Record(event):
                    stamp = {"seq": len(self.history) + 1, "at": self.now}
                    self.history.append(msgspec.structs.replace(event, **stamp))
                case SetTimer(timer, seconds):
                    self.timers[timer.value] = seconds
                case CancelTimer(timer):
                    self.timers.pop(timer.value, None)
                case End(succeeded):
                    self.outcome = succeeded

    def deliver_to(self, connection: int, message: p.Message) -> None:
        """Store an order for the agent of this connection."""
        node = next((n for n, c in self.nodes.items() if c == connection), -1)
        self.deliver(node, message)

    def deliver(self, node: int, message: p.Message) -> None:
        """Store an order for the agent of `node` until the test makes the agent answer."""
        match message:
            case p.HostStore():
                self.stores.append((node, message))
            case p.Spawn():
                self.unstarted.append((node, message))
            case p.Kill(ranks=ranks) if node >= 0:  # otherwise a spare ends ranks that it prepared
                self.doomed += ranks

    def sent_by_node(self, kind: type[M]) -> dict[int, M]:
        """Return the messages of one kind among the last commands, by node (at most one each)."""
        by_connection = {c: n for n, c in self.nodes.items()}
        found = [
            (by_connection.get(c.connection, -1), c.message)
            for c in self.commands
            if isinstance(c, Send) and isinstance(c.message, kind)
        ]
        assert len({node for node, _ in found}) == len(found), found
        return dict(found)

    def sent(self, kind: type[p.Message]) -> list[Send]:
        """Return the messages of one kind among the last commands, with their connections."""
        return [c for c in self.commands if isinstance(c, Send) and isinstance(c.message, kind)]

    def refusals(self) -> list[str]:
        """Return the reasons with which the last commands refuse agents."""
        return [each.message.refused for each in self.sent(p.EndAgent) if each.message.refused]

    def spawned_now(self) -> list[int]:
        """Return the ranks that the last commands start."""
        return sorted(rank for spawn in self.sent_by_node(p.Spawn).values() for rank in spawn.ranks)

    def recorded(self, kind: type[E]) -> list[E]:
        """Return the events of one kind in the journal."""
        return [event for event in self.history if isinstance(event, kind)]

    def last(self, kind: type[E]) -> E:
        """Return the newest event of one kind."""
        return self.recorded(kind)[-1]

    # ---- inputs

    def say(self, node: int, message: p.Message) -> None:
        """Deliver a message from the agent of `node`, as it comes out of the connection."""
        self.now += 0.001
        self._checks.message(message, self.pids)
        received = p.decode_from_agent(p.encode(message))
        self.machine.on_message(self.nodes[node], received, self.now)
        self.collect()

    def hello(self, node: int = -1, **changes: object) -> int:
        """Let a new agent ask for admission, and return its connection."""
        self._connections += 1
        self.hello_again(self._connections, node, **changes)
        return self._connections

    def hello_again(self, connection: int, node: int, **changes: object) -> None:
        """Let the agent on this connection send Hello."""
        spec = self.machine.job.spec
        fields: dict[str, object] = {
            "job_id": spec.job_id,
            "attempt": self.machine.job.attempt,
            "version": WIRE_VERSION,
            "node": node,
            "address": f"10.0.0.{max(node, 0)}",
            "pid": 10_000 + connection,
            "processes": spec.processes_per_node,
            "host": f"host-{connection}",
            "session": self.names_session,
        }
        hello = p.decode_from_agent(p.encode(p.Hello(**fields | changes)))
        self.machine.admission.on_hello(connection, hello)
        self._note_seats()
        if connection in self.nodes.values():
            own = [rank for rank in self.ranks if self.node_of(rank) == hello.node]
            self._checks.described(own, hello)
        self.collect()

    def _note_seats(self) -> None:
        self.nodes = {n.node: n.connection for n in self.machine.job.roster.nodes.values()}

    def lose(self, node: int) -> None:
        """Cut the connection to the agent of `node`."""
        connection = self.nodes.pop(node)
        self._forget(node)
        self.now += 0.001
        self.machine.losses.on_agent_lost(connection, self.now)
        self.collect()

    def lose_spare(self, connection: int) -> None:
        """Cut the connection to a spare."""
        self.machine.losses.on_agent_lost(connection, self.now)
        self.collect()

    def end(self, node: int) -> None:
        """End the agent of `node` and its ranks, after an order to end.

        Its connection is closed.
        """
        self._forget(node)

    def _forget(self, node: int) -> None:
        lost = [rank for rank in self.ranks if self.node_of(rank) == node]
        self._checks.gone(lost)
        for rank in lost:
            self.pids.pop(rank, None)
        self.stores = [(n, order) for n, order in self.stores if n != node]
        self.unstarted = [(n, spawn) for n, spawn in self.unstarted if n != node]
        self.doomed = [rank for rank in self.doomed if rank not in lost]

    def store_up(self, port: int = 29500, error: str = "") -> None:
        """Let the agent report the requested store, or that it could not start the store."""
        node, order = self.stores.pop()
        self.say(node, p.StoreUp(serial=order.serial, port=port, error=error))

    def spawned(self) -> None:
        """Let all agents start the requested ranks."""
        while self.unstarted:
            node, spawn = self.unstarted.pop(0)
            self.pids |= {rank: self._checks.new_pid() for rank in spawn.ranks}
            live = tuple(p.LiveRank(rank=rank, pid=self.pids[rank]) for rank in spawn.ranks)
            self.say(node, p.Spawned(ranks=live, generation=spawn.generation))

    def fail_to_start(self, ranks: Iterable[int], error: str = "cannot fork") -> None:
        """Let the newest start order fail for these ranks and succeed for the others."""
        node, spawn = self.unstarted.pop()
        left = tuple(rank for rank in spawn.ranks if rank not in ranks)
        if left:
            self.unstarted.append((node, msgspec.structs.replace(spawn, ranks=left)))
        for rank in ranks:
            self.say(node, p.SpawnFailed(rank=rank, error=error))

    def exits(
        self,
        rank: int,
        *,
        signal: int | None = None,
        code: int | None = None,
        error: ErrorRecord | None = None,
        finished: int = 0,
        at: float = 0.0,
    ) -> None:
        """End the process of a rank."""
        message = p.Exited(
            rank=rank,
            pid=self.pids.pop(rank),
            exit=Exit(signal=signal, code=code),
            finished=finished,
            error=error,
            at=at,
        )
        self.say(self.node_of(rank), message)

    def raises(self, rank: int, text: str = "ValueError: no", *, at: float = 0.0) -> None:
        """End a rank with an exception of the script."""
        record = ErrorRecord(message=text, traceback=f"Traceback: {text}", at=at)
        self.exits(rank, code=1, error=record)

    def killed(self) -> None:
        """End the ranks that must be killed. An agent executes older orders first."""
        self.spawned()
        doomed, self.doomed = self.doomed, []
        for rank in dict.fromkeys(doomed):
            if rank in self.pids:
                self.exits(rank, signal=15)

    def arrive(self, ranks: Iterable[int], finished: int | None = None, **more: Any) -> None:
        """Let ranks wait for a generation, by default with the state of the current one."""
        generation = self.machine.job.generation
        for rank in ranks:
            fields = {"generation": generation, "state_generation": generation, **more}
            arrived = p.Arrived(rank=rank, finished=finished, **fields)
            self.say(self.node_of(rank), arrived)

    def ready(self, ranks: Iterable[int], error: str = "") -> None:
        """Let ranks report that they have their state, or that the restore failed."""
        assert self.machine.generations.planned is not None
        generation, step = self.machine.job.generation, self.machine.generations.planned.step
        for rank in ranks:
            ready = p.StateReady(rank=rank, generation=generation, finished=step, error=error)
            self.say(self.node_of(rank), ready)

    def step(self, finished: int) -> None:
        """Let each rank finish its first step of the generation."""
        self.step_of(self.ranks, finished)

    def step_of(self, ranks: Iterable[int], finished: int) -> None:
        """Let these ranks finish their first step of the generation."""
        for rank in ranks:
            done = p.StepDone(rank=rank, generation=self.machine.job.generation, finished=finished)
            self.say(self.node_of(rank), done)

    def fail_step(
        self,
        rank: int,
        generation: int | None = None,
        kind: FaultKind = FaultKind.LINK,
        valid_steps: int | None = None,
    ) -> None:
        """Let the step of a rank fail, by default in a collective."""
        of = self.machine.job.generation if generation is None else generation
        self.say(
            self.node_of(rank),
            p.StepFailed(
                rank=rank,
                generation=of,
                kind=kind,
                error="Connection closed by peer",
                finished=self.machine.job.roster.ranks[rank].finished,
                valid_steps=valid_steps,
            ),
        )

    def fire(self, name: str) -> None:
        """Let a time limit expire."""
        del self.timers[name]
        self.now += 1000.0
        self.machine.on_timer(Timer(name), self.now)
        self.collect()

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the job."""
        self.machine.endings.stop("stopped by a test", at_once=at_once)
        self.collect()

    # ---- paths to common states

    def start(self) -> None:
        """Connect all agents and start all ranks."""
        for node in range(self.machine.job.spec.nodes):
            self.hello(node)
        self.store_up()
        self.spawned()

    def form(self, finished: int | None = None) -> None:
        """Let all other ranks arrive, and let all ranks restore their state."""
        waiting = [rank for rank in self.ranks if self.status(rank) is not Status.WAITING]
        self.arrive(waiting, finished)
        self.ready(self.ranks)

    def train(self, finished: int = 1) -> None:
        """Bring the job to the state in which each rank has finished `finished` steps."""
        self.start()
        self.form()
        self.step(finished)
