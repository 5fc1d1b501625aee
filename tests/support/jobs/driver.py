"""The coordinator's machine driven without I/O: messages in, commands out.

Every command is held against what no machine may ever do, in whatever test it comes up.
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
from rekindle.coordinator.machine.node_check import NodeCheckRun
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

tables = functools.cache(Tables.load)


def spec_of(*, nodes: int, processes: int, **settings: object) -> JobSpec:
    """A job that exists nowhere."""
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
    """One machine, and what its agents would remember.

    commands: what the machine asked for because of the last event; timers: those that run.
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
            policy=policy or Policy(),
            min_nodes=least,
            **settings,
        )
        self.machine = Machine(
            spec, tables, attempt=attempt, earlier=JobHistory(generation=generation)
        )
        self.now = 1000.0
        self.commands: list[Command] = []
        started = journal.JobStarted(
            job_id=spec.job_id, attempt=attempt, nodes=nodes, processes_per_node=processes, pid=1
        )
        self.history: list[journal.Event] = [started]
        self.timers: dict[str, float] = {}
        self.outcome: bool | None = None
        self.nodes: dict[int, int] = {}  # node -> connection
        self.pids: dict[int, int] = {}  # rank -> its process, as its agent knows it
        self.stores: list[tuple[int, p.HostStore]] = []
        self.unstarted: list[tuple[int, p.Spawn]] = []
        self.doomed: list[int] = []
        self.examinations: list[tuple[int, ...]] = []
        self._check: NodeCheckRun | None = None  # the newest of nodes that have become slow
        self.promotions: list[tuple[int, int]] = []  # spares (connections) and the node they become
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
        """The coordinator dies; another one begins with the journal, and with no agent."""
        old, events = self.machine, self.history
        before, left = earlier(events), inheritance(events, old.job.attempt)
        check_inherited(old, before, left)
        self.machine = Machine(old.job.spec, tables, attempt=old.job.attempt, earlier=before)
        self.nodes, self.timers, self.stores, self.unstarted = {}, {}, [], []
        self._checks.forget_arrivals()
        self.machine.takeover.start(left)
        self.collect()

    # ---- what came out

    def collect(self) -> None:
        """Take the machine's commands, check them, and remember what agents have to do."""
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
                    node = next((n for n, c in self.nodes.items() if c == connection), -1)
                    self.deliver(node, message)
                case Record(event):
                    stamp = {"seq": len(self.history) + 1, "at": self.now}
                    self.history.append(msgspec.structs.replace(event, **stamp))
                case SetTimer(timer, seconds):
                    self.timers[timer.value] = seconds
                case CancelTimer(timer):
                    self.timers.pop(timer.value, None)
                case End(succeeded):
                    self.outcome = succeeded

    def deliver(self, node: int, message: p.Message) -> None:
        """Remember what the agent of `node` is asked for, until a test lets it answer."""
        match message:
            case p.HostStore():
                self.stores.append((node, message))
            case p.Spawn():
                self.unstarted.append((node, message))
            case p.Kill(ranks=ranks):
                self.doomed += ranks

    def told(self, kind: type[M]) -> dict[int, M]:
        """The messages of one kind among the last commands, by node (at most one each)."""
        by_connection = {c: n for n, c in self.nodes.items()}
        found = [
            (by_connection.get(c.connection, -1), c.message)
            for c in self.commands
            if isinstance(c, Send) and isinstance(c.message, kind)
        ]
        assert len({node for node, _ in found}) == len(found), found
        return dict(found)

    def sent(self, kind: type[p.Message]) -> list[Send]:
        """The messages of one kind among the last commands, with their lines."""
        return [c for c in self.commands if isinstance(c, Send) and isinstance(c.message, kind)]

    def refusals(self) -> list[str]:
        """The reasons for which the last commands refuse agents."""
        return [each.message.refused for each in self.sent(p.Bye) if each.message.refused]

    def spawned_now(self) -> list[int]:
        """The ranks that the last commands start."""
        return sorted(rank for spawn in self.told(p.Spawn).values() for rank in spawn.ranks)

    def recorded(self, kind: type[E]) -> list[E]:
        """The journal's events of one kind so far."""
        return [event for event in self.history if isinstance(event, kind)]

    def last(self, kind: type[E]) -> E:
        """The newest event of one kind."""
        return self.recorded(kind)[-1]

    # ---- what goes in

    def say(self, node: int, message: p.Message) -> None:
        """The agent of `node` says something."""
        self.now += 0.001
        self._checks.message(message, self.pids)
        self.machine.on_message(self.nodes[node], message, self.now)
        self.collect()

    def hello(self, node: int = -1, **changes: object) -> int:
        """An agent asks to be taken in; return its connection."""
        self._connections += 1
        self.hello_again(self._connections, node, **changes)
        return self._connections

    def hello_again(self, connection: int, node: int, **changes: object) -> None:
        """The agent on this line says hello."""
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
        }
        hello = p.Hello(**fields | changes)
        self.machine.admission.on_hello(connection, hello)
        self._note_seats()
        if connection in self.nodes.values():
            own = [rank for rank in self.ranks if self.node_of(rank) == hello.node]
            self._checks.described(own, hello)
        self.collect()

    def _note_seats(self) -> None:
        self.nodes = {n.node: n.connection for n in self.machine.job.roster.nodes.values()}

    def lose(self, node: int) -> None:
        """The line to the agent of `node` is cut."""
        connection = self.nodes.pop(node)
        self._forget(node)
        self.now += 0.001
        self.machine.losses.on_agent_lost(connection, self.now)
        self.collect()

    def lose_spare(self, connection: int) -> None:
        """The line to a spare is cut."""
        self.machine.losses.on_agent_lost(connection, self.now)
        self.collect()

    def end(self, node: int) -> None:
        """The agent of `node`, which was told to, has ended with its ranks; its line is no more."""
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
        """The agent that was asked for a store has it, or could not."""
        node, order = self.stores.pop()
        self.say(node, p.StoreUp(serial=order.serial, port=port, error=error))

    def spawned(self) -> None:
        """Every agent that was told to start ranks has done so."""
        while self.unstarted:
            node, spawn = self.unstarted.pop(0)
            self.pids |= {rank: self._checks.new_pid() for rank in spawn.ranks}
            live = tuple(p.LiveRank(rank=rank, pid=self.pids[rank]) for rank in spawn.ranks)
            self.say(node, p.Spawned(ranks=live, generation=spawn.generation))

    def fail_to_start(self, ranks: Iterable[int], error: str = "cannot fork") -> None:
        """The newest order to start ranks fails for these; the others are started."""
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
        """A rank's process ends."""
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
        """A rank ends with an exception of the script."""
        record = ErrorRecord(message=text, traceback=f"Traceback: {text}", at=at)
        self.exits(rank, code=1, error=record)

    def killed(self) -> None:
        """The ranks that had to be killed have ended; an agent carries out older orders first."""
        self.spawned()
        doomed, self.doomed = self.doomed, []
        for rank in dict.fromkeys(doomed):
            if rank in self.pids:
                self.exits(rank, signal=15)

    def arrive(self, ranks: Iterable[int], finished: int | None = None, **more: Any) -> None:
        """Ranks wait for a generation, with the state of the last one if nothing else is said."""
        generation = self.machine.job.generation
        for rank in ranks:
            said = {"generation": generation, "made": generation, **more}
            arrived = p.Arrived(rank=rank, finished=finished, **said)
            self.say(self.node_of(rank), arrived)

    def ready(self, ranks: Iterable[int], error: str = "") -> None:
        """Ranks have their state, or could not get it."""
        for rank in ranks:
            ready = p.StateReady(rank=rank, generation=self.machine.job.generation, error=error)
            self.say(self.node_of(rank), ready)

    def step(self, finished: int) -> None:
        """Every rank finishes its first step of the generation."""
        self.step_of(self.ranks, finished)

    def step_of(self, ranks: Iterable[int], finished: int) -> None:
        """These ranks finish their first step of the generation."""
        for rank in ranks:
            done = p.StepDone(rank=rank, generation=self.machine.job.generation, finished=finished)
            self.say(self.node_of(rank), done)

    def fail_step(
        self,
        rank: int,
        generation: int | None = None,
        kind: FaultKind = FaultKind.LINK,
        clean: int | None = None,
    ) -> None:
        """A rank's step raised; a collective, if nothing else is said."""
        of = self.machine.job.generation if generation is None else generation
        self.say(
            self.node_of(rank),
            p.StepFailed(
                rank=rank,
                generation=of,
                kind=kind,
                error="Connection closed by peer",
                finished=self.machine.job.roster.ranks[rank].finished,
                clean=clean,
            ),
        )

    def fire(self, name: str) -> None:
        """A time limit passes."""
        del self.timers[name]
        self.now += 1000.0
        self.machine.on_timer(Timer(name), self.now)
        self.collect()

    def stop(self, *, at_once: bool = False) -> None:
        """The job is told to end."""
        self.machine.endings.stop("stopped by a test", at_once=at_once)
        self.collect()

    # ---- ways to somewhere

    def start(self) -> None:
        """All agents come, and all ranks are started."""
        for node in range(self.machine.job.spec.nodes):
            self.hello(node)
        self.store_up()
        self.spawned()

    def form(self, finished: int | None = None) -> None:
        """Every rank that does not wait yet arrives, and gets its state."""
        waiting = [rank for rank in self.ranks if self.status(rank) is not Status.WAITING]
        self.arrive(waiting, finished)
        self.ready(self.ranks)

    def train(self, finished: int = 1) -> None:
        """Bring the job from its start to where each rank has finished so many steps."""
        self.start()
        self.form()
        self.step(finished)
