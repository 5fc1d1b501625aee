"""Measure the coordinator's machine alone at scale: CPU milliseconds per stage, without any I/O.

It gets the same messages as on the wire, with one rank per node. It does not read, decode, encode
or write. Time of `coordinator_scale.py` that is missing here belongs to the connections.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.coordinator.machine.job_state import Phase, Send
from rekindle.coordinator.machine.machine import Machine
from rekindle.job.spec import EntryKind, JobSpec
from rekindle.names import WIRE_VERSION
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Exit
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.policy.policy import Policy

SIGKILL = 9
MANY = 64
FEWEST = 2 * MANY


def machine_ms(nodes: int) -> dict[str, float]:
    """Return the machine's CPU milliseconds for each stage of a job of at least FEWEST nodes."""
    run = _Run(nodes)
    run.start()
    run.lose_ranks("one rank killed", [nodes // 2])
    run.lose_ranks("64 ranks killed", range(0, nodes, nodes // MANY)[:MANY])
    run.lose_nodes("one node lost", [1])
    run.lose_nodes("64 nodes lost", range(1, nodes, nodes // MANY)[:MANY])
    run.stop()
    return run.taken


class _Run:
    """One job from its start to its end; each stage is measured as one unit."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.machine = Machine(_spec(nodes), Tables.load)
        self.taken: dict[str, float] = {}
        self.steps = 0
        self._pids = dict.fromkeys(range(nodes), 0)
        self._next_pid = 1
        self._next_line = 0
        self._lines: dict[int, int] = {}
        self._unstarted: list[p.Spawn] = []
        self.machine.takeover.start()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.process_time()
        yield
        self.taken[name] = round((time.process_time() - begin) * 1000, 1)
        for command in self.machine.job.drain():
            if isinstance(command, Send) and isinstance(command.message, p.Spawn):
                self._unstarted.append(command.message)

    def _say(self, node: int, message: p.Message) -> None:
        self.machine.on_message(self._lines[node], message, 1.0)

    def _hello(self, node: int) -> None:
        self._next_line += 1
        self._lines[node] = self._next_line
        hello = p.Hello(
            job_id="scale",
            attempt=0,
            version=WIRE_VERSION,
            node=node,
            address="127.0.0.1",
            pid=1,
            processes=1,
        )
        self.machine.admission.on_hello(self._next_line, hello)

    # ---- stages

    def start(self) -> None:
        """Connect all agents, start all ranks, and train."""
        with self._stage("all agents say hello"):
            for node in range(self.nodes):
                self._hello(node)
        with self._stage("store up, all ranks ordered"):
            self._say(0, p.StoreUp(serial=1, port=29500))
        self._spawned("all ranks started")
        self._regroup("first", range(self.nodes), None)
        with self._stage("a beat of each agent"):
            for node in range(self.nodes):
                self._say(node, p.Heartbeat(finished={node: 2}, total=9, metrics={"loss": 1.0}))

    def lose_ranks(self, name: str, ranks: range | list[int]) -> None:
        """Kill these processes; the other ranks leave their step."""
        with self._stage(f"{name}: seen, all told"):
            for rank in ranks:
                self._exited(rank)
        self._spawned(f"{name}: started anew")
        lost = set(ranks)
        self._regroup(name, [r for r in range(self.nodes) if r not in lost], self.steps)

    def lose_nodes(self, name: str, lost: range | list[int]) -> None:
        """Lose nodes; other agents replace them."""
        with self._stage(f"{name}: seen, all told"):
            for node in lost:
                self.machine.losses.on_agent_lost(self._lines[node], 1.0)
        with self._stage(f"{name}: replaced"):
            for node in lost:
                self._hello(node)
        self._spawned(f"{name}: started anew")
        self._regroup(name, [r for r in range(self.nodes) if r not in lost], self.steps)

    def stop(self) -> None:
        """Stop the job."""
        with self._stage("stopped: all told"):
            self.machine.endings.stop("enough")
        with self._stage("stopped: all ended"):
            for rank in range(self.nodes):
                self._exited(rank)
        assert self.machine.job.phase is Phase.ENDED

    # ---- parts of the stages

    def _exited(self, rank: int) -> None:
        gone = p.Exited(rank=rank, pid=self._pids[rank], exit=Exit(signal=SIGKILL), finished=2)
        self._say(rank, gone)

    def _spawned(self, name: str) -> None:
        orders, self._unstarted = self._unstarted, []
        with self._stage(name):
            for order in orders:
                for rank in order.ranks:
                    self._pids[rank] = self._next_pid
                    self._next_pid += 1
                    live = (p.LiveRank(rank=rank, pid=self._pids[rank]),)
                    self._say(rank, p.Spawned(ranks=live, generation=order.generation))

    def _regroup(self, name: str, with_state: range | list[int], finished: int | None) -> None:
        """Let all ranks arrive; the ranks in `with_state` have `finished` steps."""
        held = set(with_state)
        generation = self.machine.job.generation
        with self._stage(f"{name}: all arrived, planned"):
            for rank in range(self.nodes):
                has = finished if rank in held else None
                self._say(rank, p.Arrived(rank=rank, generation=generation, finished=has))
        assert self.machine.job.generation == generation + 1
        with self._stage(f"{name}: all have their state"):
            for rank in range(self.nodes):
                ready = p.StateReady(rank=rank, generation=generation + 1, finished=self.steps)
                self._say(rank, ready)
        self.steps += 1
        with self._stage(f"{name}: first step of all"):
            for rank in range(self.nodes):
                done = p.StepDone(rank=rank, generation=generation + 1, finished=self.steps)
                self._say(rank, done)
        assert self.machine.job.phase is Phase.TRAINING
        assert not self.machine.job.incidents.open


def _spec(nodes: int) -> JobSpec:
    return JobSpec(
        job_id="scale",
        entry=EntryKind.SCRIPT,
        target="train.py",
        nodes=nodes,
        working_directory="nowhere",
        directory="nowhere",
        log_directory="nowhere",
        checkpoint_store="nowhere",
        policy=Policy(max_recoveries=1000),
    )
