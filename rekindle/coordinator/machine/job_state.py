"""The state that all parts of the machine share, isolated hosts, and the commands."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from rekindle.coordinator.machine.incidents import Incidents
from rekindle.coordinator.machine.inheritance import JobHistory
from rekindle.coordinator.machine.roster import Rank, Roster, Status
from rekindle.job.spec import JobSpec, KeepsOff
from rekindle.protocol import agent as p
from rekindle.protocol.agent import Hello
from rekindle.recovery.faults.fault import Fault, FaultKind, root_cause
from rekindle.recovery.faults.health_events import HealthEventLog
from rekindle.recovery.journal import journal

if TYPE_CHECKING:
    from rekindle.recovery.faults.tables.tables import Tables

# Number of refused agents of one host, while nodes are awaited, after which waiting is useless. The
# first agent may be the old one, restarted on its host. If the engine avoids the host only at a new
# placement of the job, the second agent was placed there again. So may be all later ones. If the
# engine avoids the host immediately, five agents show that it does not: rights may be missing, or a
# user has released the host.
_ENOUGH = {KeepsOff.RESTARTS: 2, KeepsOff.AT_ONCE: 5}
Report = Callable[[Fault], None]  # takes a fault: `Recovery.report`
Proceed = Callable[[], None]  # forms the next generation if all ranks wait: `Machine._proceed`


class IsolatedHosts:
    """The hosts that this attempt has isolated, and the nodes that had to leave them.

    A user may release a host at any time. The job does not return to it before its next placement.
    """

    def __init__(self, keeps_off: KeepsOff) -> None:
        self._keeps_off = keeps_off
        self._hosts: set[str] = set()
        self._leaving: set[int] = set()  # not yet joined from another host
        self._refused: Counter[str] = Counter()  # by host, while the job awaited a leaving node

    def add(self, hosts: Iterable[str], nodes: Iterable[int]) -> None:
        """Note isolated hosts, and nodes that leave them."""
        self._hosts.update(hosts)
        self._leaving.update(nodes)

    def shuts_out(self, host: str) -> bool:
        """Return whether the coordinator admits no new agent from this host."""
        return self._keeps_off is not KeepsOff.NEVER and host in self._hosts

    def refuses(self, hello: Hello) -> bool:
        """Return whether the coordinator refuses an agent because of its host.

        An agent that was a node before stays, because its order to leave reaches it.
        """
        is_new = hello.node < 0 and not hello.ranks and not hello.ended
        return is_new and self.shuts_out(hello.host)

    def refused(self, host: str, waited_for: Iterable[int]) -> list[int]:
        """Note a refused agent. Return those of these nodes that must come from another host.

        The other nodes were lost for another reason, so their own pods may return.
        """
        awaited = sorted(self._leaving.intersection(waited_for))
        if awaited:
            self._refused[host] += 1
        return awaited

    def came(self, node: int) -> None:
        """Note that an agent became a node or a spare."""
        self._leaving.discard(node)
        self._refused.clear()

    def just_in_vain(self, host: str) -> bool:
        """Return whether the last refused agent of this host has reached the limit."""
        return self._refused[host] == _ENOUGH.get(self._keeps_off)

    @property
    def is_in_vain(self) -> bool:
        """Return whether only agents of isolated hosts come."""
        enough = _ENOUGH.get(self._keeps_off)
        return enough is not None and any(each >= enough for each in self._refused.values())


class Phase(str, enum.Enum):
    """The phase of the job.

    The ranks of a script without a Session are in REGROUPING until they end.
    """

    GATHERING = "gathering"  # agents join, the ranks' store starts, then the ranks
    REGROUPING = "regrouping"  # ranks arrive: new ones at their Session, others after their step
    RESTORING = "restoring"  # the generation is formed; ranks take their state
    TRAINING = "training"  # ranks do steps; a fault leads to REGROUPING
    RESTARTING = "restarting"  # all ranks end, and start again
    STOPPING = "stopping"  # all ranks end permanently
    FINAL_CHECKPOINT = "final-checkpoint"  # nodes write the newest snapshot as the final checkpoint
    ENDED = "ended"


ENDING = (Phase.STOPPING, Phase.FINAL_CHECKPOINT, Phase.ENDED)
_ENDS = (Phase.RESTARTING, Phase.STOPPING)
NEXT: dict[Phase, tuple[Phase, ...]] = {
    Phase.GATHERING: (Phase.REGROUPING, Phase.RESTORING, *_ENDS),
    Phase.REGROUPING: (Phase.REGROUPING, Phase.RESTORING, *_ENDS, Phase.ENDED),
    Phase.RESTORING: (Phase.REGROUPING, Phase.TRAINING, *_ENDS, Phase.ENDED),
    Phase.TRAINING: (Phase.REGROUPING, *_ENDS, Phase.ENDED),
    Phase.RESTARTING: (Phase.GATHERING, Phase.STOPPING, Phase.ENDED),
    Phase.STOPPING: (Phase.STOPPING, Phase.FINAL_CHECKPOINT, Phase.ENDED),
    Phase.FINAL_CHECKPOINT: (Phase.FINAL_CHECKPOINT, Phase.ENDED),
    Phase.ENDED: (),
}


# ---- commands


class Send(msgspec.Struct, frozen=True):
    """Send a message to the agent on this connection."""

    connection: int
    message: p.Message


class Record(msgspec.Struct, frozen=True):
    """Append an event to the journal. The journal file sets its seq and time."""

    event: journal.Event


class Timer(str, enum.Enum):
    """The time limits of the machine and of its node checks."""

    LATE = "late"  # request nodes that did not join
    NODE = "node"  # give up nodes that did not join
    WANTED = "wanted"  # request agents again that were requested and did not join
    JOIN = "join"  # ranks that do not reach their Session, or do not get their state
    LEAVE = "leave"  # ranks that do not leave their step
    COME = "come"  # ranks outside the world that do not reach their Session
    END = "end"  # ranks that SIGKILL does not end
    FINAL_CHECKPOINT = "final-checkpoint"  # a final checkpoint that is late
    APPROVAL = "approval"  # a user who does not answer
    HEALTH_EVENTS = "health-events"  # the next check of health events
    DOUBT = "doubt"  # a fault that health events may explain
    LOOK = "look"  # agents that do not answer an inspection
    AGAIN = "again"  # the second inspection because of a suspect
    CHECK = "check"  # nodes that do not answer their check
    CHECK_BEGINS = "check-begins"
    EXAMINATION = "examination"  # the same, while ranks wait
    EXAMINATION_BEGINS = "examination-begins"
    MOVE = "move"  # the next deadline of a planned move
    PREPARE = "prepare"  # ranks on a prepared spare that do not reach their Session, or do not end


class SetTimer(msgspec.Struct, frozen=True):
    """Call `on_timer(timer)` after this time. The command replaces an earlier time of the timer."""

    timer: Timer
    seconds: float


class CancelTimer(msgspec.Struct, frozen=True):
    """Cancel the timer."""

    timer: Timer


class End(msgspec.Struct, frozen=True):
    """The job is over, and EndAgent was sent to all agents."""

    succeeded: bool


Command = Send | Record | SetTimer | CancelTimer | End


class RendezvousStore:
    """The ranks' store: its address, or the node that was asked to host it."""

    def __init__(self) -> None:
        self.node = -1
        self.last = -1  # the node that hosted the newest one
        self.host = ""
        self.port = 0
        self.serial = 0
        self.asked = -1

    @property
    def is_up(self) -> bool:
        """Return whether the store listens."""
        return self.port > 0

    def ask(self, node: int, serial: int) -> None:
        """Note that `node` starts a new store with this serial number."""
        self.asked, self.serial = node, serial

    def came_up(self, node: int, host: str, port: int) -> None:
        """Note that the store listens."""
        self.node, self.host, self.port, self.asked = node, host, port, -1
        self.last = node

    def adopt(self, node: int, host: str, store: p.LiveStore) -> None:
        """Note that `node` hosts the store already."""
        self.serial = store.serial
        self.came_up(node, host, store.port)

    def drop(self) -> None:
        """Delete the store's address: the store has ended, or must not be used again."""
        self.node, self.port, self.asked = -1, 0, -1

    def node_lost(self, node: int) -> None:
        """Delete the store's address if this node hosts the store or starts it."""
        if node in (self.node, self.asked):
            self.drop()


class HangInspection:
    """One inspection of all ranks.

    at: generation and restarts at its start, which may have changed when all nodes have answered.

    wanted: nodes that have not answered. blind: nodes that could not inspect. patient: whether
    nodes have more time than usual.
    """

    def __init__(self, serial: int, at: tuple[int, int], wanted: set[int]) -> None:
        self.serial = serial
        self.at = at
        self.wanted = wanted
        self.blind: set[int] = set()
        self.results: list[p.RankInspection] = []
        self.patient = False


class JobState:
    """The state that several parts of the machine read and change.

    generation, restarts: the newest numbers. newest: the newest step that a rank has finished.
    resumed: the step after which all ranks last started to train together.

    session: whether a rank of the current generation has a Session. sessions_seen: whether a rank
    of this attempt had one. formed: whether a generation was formed since the last restart, and
    its ranks have not finished all steps. met: the same, also after they have finished all steps.

    names_session: whether the script imports Rekindle, as seen by an agent.

    newcomers: nodes that joined the world and have not finished a step in it. devices: whether a
    node has devices that health events can describe.

    sent_home: connections of dismissed agents. tables: returns the tables of faults.
    moved_away: agents (address, process) that a planned move has replaced before a takeover.
    paused_for: why the last generation was paused; None: a fault ended it.

    interruption: the end of all earlier ranks that no incident explains yet.

    inspection: the inspection of all ranks that is under way. suspect: the rank that a second
    inspection may confirm as the cause of a hang.
    """

    def __init__(
        self, spec: JobSpec, tables: Callable[[], Tables], attempt: int, earlier: JobHistory
    ) -> None:
        self.spec = spec
        self.tables = tables
        self.attempt = attempt
        self.phase = Phase.GATHERING
        self.generation = earlier.generation
        self.restarts = 0
        self.newest = 0
        self.resumed = 0
        self.session = self.sessions_seen = self.formed = self.met = False
        self.names_session = False
        self.devices = False
        self.roster = Roster(spec)
        self.incidents = Incidents(earlier.incident, earlier.past)
        self.health_events = HealthEventLog(
            earlier.health_events, earlier.at, earlier.device_starts
        )
        self.suspicions = list(earlier.suspicions)
        self.isolation = IsolatedHosts(spec.keeps_off)
        self.store = RendezvousStore()
        self.newcomers: set[int] = set()
        self.sent_home: set[int] = set()
        self.moved_away: frozenset[tuple[str, int]] = frozenset()
        self.paused_for: p.Cause | None = None
        self.interruption = earlier.interruption
        self.inspection: HangInspection | None = None
        self.suspect: p.RankInspection | None = None
        self._serial = earlier.serial
        self._commands: list[Command] = []

    @property
    def has_begun(self) -> bool:
        """Return whether this attempt has started ranks."""
        gathering = self.phase is Phase.GATHERING and not self.restarts
        return not (gathering and self.roster.all_are(Status.ABSENT))

    @property
    def has_session(self) -> bool:
        """Return whether the script has a Session, or will have one."""
        return self.names_session or self.sessions_seen

    @property
    def is_starting(self) -> bool:
        """Return whether the ranks of a script with a Session have not met since they started."""
        return self.has_session and not self.met

    @property
    def is_over(self) -> bool:
        """Return whether the ranks have finished all steps of their Session."""
        return self.met and not self.formed

    @property
    def cause(self) -> p.Cause | None:
        """Return why the last generation ended, as far as it is known now."""
        faults = self.incidents.faults
        if not faults:
            return self.paused_for
        ranks = {rank for fault in faults for rank in self._ranks_of(fault)}
        strategy = self.incidents.strategy
        return p.Cause(
            kind=root_cause(faults).kind.value,
            strategy=strategy.value if strategy else "",
            ranks=tuple(sorted(ranks)),
        )

    def _ranks_of(self, fault: Fault) -> list[int]:
        if fault.rank >= 0:
            return [fault.rank]
        return [rank.rank for rank in self.roster.ranks_of(fault.node)] if fault.node >= 0 else []

    def is_on_trial(self, node: int) -> bool:
        """Return whether a node has just joined, and the world may shrink by it."""
        if node not in self.newcomers or self.phase in (Phase.RESTARTING, *ENDING):
            return False
        left = sum(member.node != node for member in self.roster.members)
        return left >= self.spec.least_nodes

    def enter(self, phase: Phase) -> None:
        """Change the phase. `NEXT` must allow the change."""
        assert phase in NEXT[self.phase], f"{self.phase.value} is not followed by {phase.value}"
        self.phase = phase

    def next_serial(self) -> int:
        """Return the number of a new order. No order of an earlier coordinator has it."""
        self._serial += 1
        return self._serial

    def do(self, command: Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def record(self, event: journal.Event) -> None:
        """Add the command to write an event to the journal."""
        self._commands.append(Record(event))

    def send_home(self, connection: int, bye: p.EndAgent) -> None:
        """Dismiss an agent. The machine ignores its later messages."""
        self.do(Send(connection, bye))
        self.sent_home.add(connection)

    def suspect_states(self, valid_steps: int, *, rank: int, generation: int = 0) -> None:
        """Note that states after these steps may be wrong on all ranks. No rank may use them.

        generation: the newest one that may have made such a state, if it is not this one.
        """
        generation = max(generation, self.generation)
        self.suspicions.append((generation, valid_steps))
        self.record(journal.Suspected(generation=generation, valid_steps=valid_steps, rank=rank))

    def stop_inspection(self) -> None:
        """Drop the inspection that is under way, and the suspect."""
        self.inspection = self.suspect = None
        self.do(CancelTimer(Timer.LOOK))
        self.do(CancelTimer(Timer.AGAIN))

    def drain(self) -> list[Command]:
        """Return the commands since the last call."""
        commands, self._commands = self._commands, []
        return commands

    def fault(self, kind: FaultKind, rank: Rank, text: str, now: float = 0.0) -> Fault:
        """Create a fault of a rank."""
        return Fault(
            kind=kind,
            message=text,
            rank=rank.rank,
            node=rank.node,
            finished=rank.finished,
            signature=kind.value,
            at=now,
        )
