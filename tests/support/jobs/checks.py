"""Invariants of the coordinator's state machine and its commands, for all inputs."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.coordinator.machine.inheritance import JobHistory, TakeoverState
from rekindle.coordinator.machine.job_state import Command, End, Phase, Send
from rekindle.coordinator.machine.machine import Machine
from rekindle.coordinator.machine.roster import Roster
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind


def check_counts(roster: Roster) -> None:
    """Compare the incremental counters of the roster with counts over all ranks and nodes."""
    for status, counted in roster.index.status.items():
        assert counted == {rank.rank for rank in roster.world if rank.status is status}
    assert roster.all_stepped == all(rank.stepped for rank in roster.world)
    places = [roster.place_of(rank) for rank in roster.world]
    assert places == list(range(roster.world_size))
    assert roster.is_full == (not roster.missing)
    connections = [agent.connection for agent in roster.agents()]
    assert all(roster.knows(connection) for connection in connections)
    lines = {node.connection: node for node in roster.nodes.values()}
    found = {connection: roster.by_connection(connection) for connection in connections}
    assert {line: node for line, node in found.items() if node is not None} == lines


def check_inherited(old: Machine, past: JobHistory, left: TakeoverState | None) -> None:
    """Check that a new coordinator restores the state of the failed one from the journal alone."""
    assert list(past.past) == old.job.incidents.past, "a decision is lost, or about another fault"
    assert (past.profile, past.traced) == (old.switch.profile, old.switch.traced)
    assert past.device_starts.keys() >= old.job.health_events._older.keys()
    if left is None:
        return
    if left.stopping is not None:
        assert old.job.phase in (Phase.STOPPING, Phase.FINAL_CHECKPOINT)
        assert left.stopping.outcome == old.endings.outcome
        return
    assert old.job.phase not in (Phase.STOPPING, Phase.FINAL_CHECKPOINT)
    assert left.awaiting == old.job.incidents.awaiting
    held = [
        fault
        for fault in old.job.incidents.held
        if fault.kind not in (FaultKind.COORDINATOR, FaultKind.LINK)
    ]
    assert list(left.held) == held
    assert left.to_reset >= old.fleet.to_reset
    if old.job.phase is not Phase.RESTARTING:
        assert left.met == old.job.met
    assert set(left.isolated) == old.job.isolation._hosts
    assert left.leaving == old.job.isolation._leaving


class Checks:
    """Invariants of all commands, for all inputs."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._forming: set[int] = set()
        self._alive: set[int] = set()  # ranks that were started and have not ended
        self._arrived: set[int] = set()
        self._pid = 100
        self._ended = False

    def new_pid(self) -> int:
        self._pid += 1
        return self._pid

    def message(self, message: p.Message, pids: dict[int, int]) -> None:
        """Follow a message that the state machine gets."""
        match message:
            case p.Exited(rank=rank, pid=pid) if pids.get(rank) in (None, pid):
                self.gone([rank])
            case p.SpawnFailed(rank=rank):
                self.gone([rank])
            case p.Arrived(rank=rank):
                self._arrived.add(rank)

    def gone(self, ranks: Iterable[int]) -> None:
        """Record that these ranks have no process."""
        self._alive -= set(ranks)
        self._arrived -= set(ranks)

    def described(self, ranks: Iterable[int], hello: p.Hello) -> None:
        """Record the live ranks that an agent reports to a new coordinator."""
        self._alive -= set(ranks)
        self._alive |= {live.rank for live in hello.ranks}

    def forget_arrivals(self) -> None:
        """Forget arrivals: ranks that have arrived must report again to the new coordinator."""
        self._arrived, self._forming = set(), set()

    def command(self, command: Command, nodes: dict[int, int]) -> None:
        """Fail if the command is invalid in the current state."""
        refusal = isinstance(command, Send) and isinstance(command.message, p.EndAgent)
        refusal = refusal and bool(command.message.refused)
        assert refusal or not self._ended, f"after the end: {command}"
        match command:
            case Send(connection, p.FormGeneration() as form):
                assert connection in nodes
                self._form(form)
            case Send(connection, p.Spawn() as spawn):
                assert connection in nodes
                twice = self._alive & set(spawn.ranks)
                assert not twice, f"ranks {twice} are started twice"
                self._alive |= set(spawn.ranks)
                self._arrived -= set(spawn.ranks)
            case Send(_, p.Promote() | p.Prepare() | p.Kill() | p.Welcome() | p.EndAgent()):
                pass  # spares can also get these
            case Send(connection, message) if isinstance(message, p.CheckOrder):
                pass  # agents without a node can also get this
            case Send(connection) if not refusal:
                assert connection in nodes
            case End():
                self._ended = True

    def _form(self, form: p.FormGeneration) -> None:
        if self._forming & set(form.plan) or form.generation != self._generation:
            assert form.generation > self._generation, "a generation comes twice"
            self._generation, self._forming = form.generation, set()
        self._forming |= set(form.plan)
        absent = set(form.plan) - self._arrived
        assert not absent, f"ranks {absent} did not arrive for generation {form.generation}"
        self._arrived -= set(form.plan)
