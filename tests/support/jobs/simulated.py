"""Simulated agents and ranks around one state machine. Only each connection preserves its order.

A message stays on its connection until a move delivers it. So tests can cover crossing messages:
late orders, messages from processes that have ended, and nodes that fail with undelivered messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobs.driver import Driver
from jobs.processes import Agent, Doing, Process
from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import ErrorRecord, Exit, FaultKind
from rekindle.recovery.policy.plan import StateSource


class World(Driver):
    """A job of simulated processes.

    `total`: the number of steps of the training.
    """

    def __init__(self, *, total: int = 6, **settings: Any) -> None:
        self.agents: dict[int, Agent] = {}
        self.spares: set[int] = set()  # their connections
        self.cut_spares = 0  # spares whose coordinator failed
        self.total = total
        self.stored: list[tuple[int, int]] = []  # checkpoints: step and generation, newest first
        self._next_pid = 100
        super().__init__(**settings)

    # ---- possible moves

    @property
    def processes(self) -> dict[int, Process]:
        """The live processes by rank."""
        return {r: q for agent in self.agents.values() for r, q in agent.ranks.items()}

    def moves(self) -> list[Callable[[], None]]:
        """Return the moves that are possible now without a fault."""
        found: list[Callable[[], None]] = []
        for node, agent in self.agents.items():
            found += [lambda n=node: self.handle(n)] if agent.orders else []
            found += [lambda n=node: self.hear(n)] if agent.news and not agent.cut else []
            found += [lambda n=node: self.find_coordinator(n)] if agent.cut else []
        live = [rank for rank in self.processes if self.can_go_on(rank)]
        found += [lambda r=rank: self.go_on(r) for rank in live]
        found += [self.take_place] if self.promotions else []
        found += [self.spare_comes] if self.cut_spares else []
        found += self.check_moves()
        absent = [] if self.phase is Phase.STOPPING else self.absent_nodes()
        return found + [lambda n=node: self.join(n) for node in absent]

    def check_moves(self) -> list[Callable[[], None]]:
        """Return the moves of agents whose nodes are checked before they join."""
        return []

    def next_timer(self) -> str:
        """Return the running timer with the shortest time."""
        return min(self.timers, key=lambda name: self.timers[name])

    def absent_nodes(self) -> list[int]:
        """Return nodes that the engine must provide, or that have not connected since the start."""
        return [node for node in range(self.machine.job.spec.nodes) if node not in self.agents]

    def join(self, node: int) -> None:
        """Connect an agent as this node. It has the checkpoints of the shared store."""
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        self.agents[node] = Agent()
        self.hello(node, checkpoints=tuple(self.stored))

    def spare_comes(self) -> None:
        """Connect a new spare, or reconnect one whose coordinator failed."""
        self.cut_spares = max(0, self.cut_spares - 1)
        if self.phase not in (Phase.STOPPING, Phase.ENDED):
            self.spares.add(self.hello(spare=True, checkpoints=tuple(self.stored)))

    def spare_dies(self, connection: int) -> None:
        self.spares.remove(connection)
        self.lose_spare(connection)

    def take_place(self) -> None:
        """Let a promoted spare replace a node, unless another agent did so or the spare is gone."""
        connection, node = self.promotions.pop(0)
        if connection not in self.spares or self.phase in (Phase.STOPPING, Phase.ENDED):
            return
        if node in self.agents and self.agents[node].cut:
            self.lose(node)  # the old agent will find its node replaced, and end
        if node not in self.agents:
            self.agents[node] = Agent()
            self.spares.remove(connection)
        self.hello_again(connection, node, spare=True, checkpoints=tuple(self.stored))

    def lose_coordinator(self) -> None:
        """Replace the coordinator.

        Unread orders and unsent messages are lost with the connections.
        """
        for agent in self.agents.values():
            agent.lose_coordinator()
        self.cut_spares += len(self.spares)
        self.spares, self.promotions = set(), []
        super().lose_coordinator()

    def find_coordinator(self, node: int) -> None:
        """Connect an agent to the coordinator that replaced the failed one."""
        agent = self.agents[node]
        if self.phase in (Phase.STOPPING, Phase.ENDED):
            del self.agents[node]  # the coordinator refuses it, and it ends with its ranks
            self._forget(node)
            return
        self.hello(node, checkpoints=tuple(self.stored), **agent.find_coordinator())
        if node not in self.nodes:  # refused, because all ranks restart, or being checked
            self.agents.pop(node, None)
            self._forget(node)

    def deliver(self, node: int, message: p.Message) -> None:
        if node in self.agents:
            self.agents[node].orders.append(message)

    def hear(self, node: int) -> None:
        """Deliver the next message of a node, unless the coordinator has dismissed the node."""
        news = self.agents[node].news.popleft()
        if node in self.machine.job.roster.nodes:
            self.say(node, news)

    def handle(self, node: int) -> None:
        """Let the agent of a node execute its next order."""
        agent = self.agents[node]
        match agent.orders.popleft():
            case p.HostStore(serial=serial):
                agent.store = p.LiveStore(serial=serial, port=20_000 + serial)
                agent.news.append(p.StoreUp(serial=serial, port=agent.store.port))
            case p.Spawn() as spawn:
                self._spawn(agent, spawn)
            case p.Kill(ranks=ranks):
                for rank in ranks:
                    self.die(rank, signal=15)
            case p.EndAgent():
                self._go_home(node)
            case p.WriteFinalCheckpoint(step=step, generation=generation):
                written = p.CheckpointWritten(
                    step=step, generation=generation, path="there", final=True
                )
                agent.news.append(written)
                self.stored.insert(0, (step, generation))
            case p.FormGeneration() as form:
                agent.generation = form.generation
                agent.waiting.clear()
                for process in agent.ranks.values():
                    process.form = form
            case p.PauseRequest() | p.GenerationEnded() as order:
                self._tell_of_the_end(agent, order)
            case p.EndSession():
                self._dismiss(agent)

    def _tell_of_the_end(self, agent: Agent, order: p.PauseRequest | p.GenerationEnded) -> None:
        for process in agent.ranks.values():
            if isinstance(order, p.GenerationEnded):
                process.over = max(process.over, order.generation)
            elif order.rank == process.rank:
                process.hold = order.generation

    def _dismiss(self, agent: Agent) -> None:
        agent.training.clear()
        agent.waiting.clear()
        for process in agent.ranks.values():
            process.doing = Doing.DISMISSED

    def _go_home(self, node: int) -> None:
        """End an agent on order.

        While the job continues, this is a node that the world left out.
        """
        if self.outcome is None:
            self._forget(node)
            del self.agents[node]
            line = self.nodes.pop(node, None)
            if line is not None:  # otherwise another agent already replaced it
                self.lose_spare(line)

    def _spawn(self, agent: Agent, spawn: p.Spawn) -> None:
        agent.restart = spawn.restart
        for rank in spawn.ranks:
            assert rank not in agent.ranks, f"rank {rank} has two processes"
            self._next_pid += 1
            agent.ranks[rank] = Process(rank, self._next_pid)
            agent.ended.discard(rank)
        live = tuple(p.LiveRank(rank=r, pid=agent.ranks[r].pid) for r in spawn.ranks)
        agent.news.append(p.Spawned(ranks=live, generation=spawn.generation))

    # ---- moves of ranks

    def can_go_on(self, rank: int) -> bool:
        """Return whether the process of this rank can make a move without other events."""
        process = self.processes[rank]
        match process.doing:
            case Doing.WAITING:
                return process.form is not None and process.form.generation > process.generation
            case Doing.BROKEN:
                return process.over >= process.generation
            case Doing.STEPPING:
                return self._severed(process) or self._peers_keep_up(process)
            case Doing.STUCK:
                return False
        return True

    def go_on(self, rank: int) -> None:
        """Let the process of this rank make its next possible move."""
        process = self.processes[rank]
        match process.doing:
            case Doing.STARTING | Doing.BROKEN:
                self._tell(rank, process.arrived(self.total))
            case Doing.WAITING:
                self._form(process)
            case Doing.RESTORING:
                self._restore(process)
            case Doing.STEPPING:
                self._step(process)
            case Doing.DISMISSED:
                self.die(rank, code=0)

    def _tell(self, rank: int, message: p.Message) -> None:
        agent = self.agents[self.node_of(rank)]
        if isinstance(message, p.Arrived):
            agent.training.add(rank)
            agent.waiting[rank] = message
        elif isinstance(message, p.Snapshots):
            agent.snapshots |= message.kept
        agent.news.append(message)

    def _severed(self, process: Process) -> bool:
        return process.over >= process.generation

    def _form(self, process: Process) -> None:
        assert process.form is not None
        process.generation = process.form.generation
        if self._severed(process):
            self._tell(process.rank, process.arrived(self.total))
        else:
            process.doing = Doing.RESTORING

    def _restore(self, process: Process) -> None:
        assert process.form is not None
        if process.form.plan[process.rank].source is not StateSource.SELF:
            process.has_state = False
        if self._severed(process):
            self._tell(process.rank, process.arrived(self.total))
            return
        process.has_state, process.finished = True, process.form.step
        process.state_generation = process.form.state_generation
        process.doing, process.told_step = Doing.STEPPING, False
        ready = p.StateReady(
            rank=process.rank, generation=process.generation, finished=process.finished
        )
        self._tell(process.rank, ready)

    def _peers_keep_up(self, process: Process) -> bool:
        """Return whether a step of this rank can end: all peers have finished as many steps."""
        peers = self._group(process)
        return process.finished >= self.total or (
            all(
                peer.has_state
                and peer.finished >= process.finished
                and peer.doing in (Doing.STEPPING, Doing.WAITING)
                for peer in peers
            )
            and not self.lacks_somebody(process)
        )

    def _group(self, process: Process) -> list[Process]:
        """Return the live processes of its generation."""
        return [q for q in self.processes.values() if q.generation == process.generation]

    def lacks_somebody(self, process: Process) -> bool:
        """Return whether a process of its generation has ended or is in another generation."""
        assert process.form is not None
        return len(self._group(process)) < process.form.world_size

    def _step(self, process: Process) -> None:
        rank = process.rank
        if self._severed(process) or process.finished >= self.total:
            self._tell(rank, process.arrived(self.total))
            return
        if process.hold == process.generation:
            process.doing = Doing.BROKEN  # waits until the agent reports the end of the generation
            self._tell(
                rank, p.Paused(rank=rank, generation=process.generation, finished=process.finished)
            )
            return
        process.finished, process.state_generation = process.finished + 1, process.generation
        if not process.told_step:
            process.told_step = True
            done = p.StepDone(rank=rank, generation=process.generation, finished=process.finished)
            self._tell(rank, done)
        made = process.finished, process.generation
        if process.finished % 2 == 0 and rank % self.machine.job.spec.processes_per_node == 0:
            self._tell(rank, p.Snapshots(kept={rank: (made,)}))
            if rank == 0:
                written = p.CheckpointWritten(
                    step=process.finished, generation=process.generation, path="there"
                )
                self._tell(rank, written)
                self.stored.insert(0, (written.step, written.generation))

    # ---- faults

    def die(
        self,
        rank: int,
        *,
        signal: int | None = None,
        code: int | None = None,
        error: ErrorRecord | None = None,
    ) -> None:
        """End the process of this rank, if there is one."""
        agent = self.agents[self.node_of(rank)]
        process = agent.ranks.pop(rank, None)
        if process is None:
            return
        agent.training.discard(rank)
        agent.waiting.pop(rank, None)
        if code == 0:
            agent.ended.add(rank)
        agent.news.append(
            p.Exited(
                rank=rank,
                pid=process.pid,
                exit=Exit(signal=signal, code=code),
                finished=process.finished,
                error=error,
                at=self.now,
            )
        )

    def break_collective(self, rank: int) -> None:
        """Fail the collective of this rank, if it is in one."""
        process = self.processes[rank]
        if process.doing not in (Doing.STEPPING, Doing.RESTORING):
            return
        if process.doing is Doing.RESTORING:
            process.has_state = False
        process.doing = Doing.BROKEN
        if not self._severed(process):
            failed = p.StepFailed(
                rank=rank,
                generation=process.generation,
                kind=FaultKind.LINK,
                error="Connection closed by peer",
                finished=process.finished,
            )
            self._tell(rank, failed)

    def fail_restore(self, rank: int) -> None:
        """Fail the restore of this rank from a snapshot or checkpoint, if it restores from one."""
        process = self.processes[rank]
        if process.doing is not Doing.RESTORING or self._severed(process):
            return
        assert process.form is not None
        if process.form.plan[rank].source in (StateSource.SNAPSHOT, StateSource.CHECKPOINT):
            process.has_state, process.doing = False, Doing.BROKEN
            ready = p.StateReady(
                rank=rank, generation=process.generation, finished=0, error="corrupt"
            )
            self._tell(rank, ready)

    def lose(self, node: int) -> None:
        """Remove a node with its agent, its ranks and their undelivered messages."""
        if self.agents.pop(node).cut:
            self._forget(node)
        else:
            super().lose(node)

    def hang(self, rank: int) -> None:
        """Let this rank hang, so that only a signal ends it."""
        self.processes[rank].doing = Doing.STUCK
