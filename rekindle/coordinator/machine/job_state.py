"""The state that all parts of the machine share, isolated hosts, and the commands."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from rekindle.coordinator.machine.incidents import Incidents
from rekindle.coordinator.machine.inheritance import JobHistory
from rekindle.coordinator.machine.ranks import Rank, Status
from rekindle.coordinator.machine.roster import Roster
from rekindle.job.spec import JobSpec, KeepsOff
from rekindle.protocol import agent as p
from rekindle.protocol.agent import Hello
from rekindle.recovery.faults.classification import Judge
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.faults.health_events import HealthEventLog
from rekindle.recovery.journal import journal

# How many agents of one host are refused while others are waited for, before that is in vain. The
# first may be the old one, started again where it was; where the job has to be placed anew, the
# second was placed there anew, and so may be all that follow. Where the host is kept off at once,
# five mean that it is not: rights may lack, or somebody undid it.
_ENOUGH = {KeepsOff.ANEW: 2, KeepsOff.AT_ONCE: 5}


class IsolatedHosts:
    """The hosts that this attempt has isolated, and the nodes that were to leave them.

    A person may release one at any time; until the job is placed anew, none of it goes back there.
    """

    def __init__(self, keeps_off: KeepsOff) -> None:
        self._keeps_off = keeps_off
        self._hosts: set[str] = set()
        self._leaving: set[int] = set()  # that have not come from elsewhere yet
        self._refused: Counter[str] = Counter()  # by host, while such a node was waited for

    def add(self, hosts: Iterable[str], nodes: Iterable[int]) -> None:
        """Take these hosts as isolated, and these nodes as on their way elsewhere."""
        self._hosts.update(hosts)
        self._leaving.update(nodes)

    def shuts_out(self, host: str) -> bool:
        """Whether the coordinator takes no new agent from this host."""
        return self._keeps_off is not KeepsOff.NEVER and host in self._hosts

    def refuses(self, hello: Hello) -> bool:
        """Whether the coordinator refuses an agent because of its host.

        An agent that was a node before stays, because its order to leave reaches it.
        """
        is_new = hello.node < 0 and not hello.ranks and not hello.ended
        return is_new and self.shuts_out(hello.host)

    def refused(self, host: str, waited_for: Iterable[int]) -> list[int]:
        """An agent was refused; return those of these nodes that have to come from elsewhere.

        Other nodes were lost for another reason, so their own pods may come.
        """
        awaited = sorted(self._leaving.intersection(waited_for))
        if awaited:
            self._refused[host] += 1
        return awaited

    def came(self, node: int) -> None:
        """An agent became a node, or a spare."""
        self._leaving.discard(node)
        self._refused.clear()

    def just_in_vain(self, host: str) -> bool:
        """Whether the last one that was refused there was one too many."""
        return self._refused[host] == _ENOUGH.get(self._keeps_off)

    @property
    def is_in_vain(self) -> bool:
        """Whether only agents of such hosts come."""
        enough = _ENOUGH.get(self._keeps_off)
        return enough is not None and any(each >= enough for each in self._refused.values())


class Phase(str, enum.Enum):
    """Where the job is. The ranks of a script without Session are in REGROUPING until they end."""

    GATHERING = "gathering"  # agents and the ranks' store come up, ranks are started
    REGROUPING = "regrouping"  # ranks arrive: new ones at their Session, others after their step
    RESTORING = "restoring"  # the generation is formed; ranks take their state
    TRAINING = "training"  # ranks do steps; a fault leads to REGROUPING
    RESTARTING = "restarting"  # all ranks are being ended, to be started again
    STOPPING = "stopping"  # all ranks are being ended, for good
    DUMPING = "dumping"  # nodes write the newest snapshot, as the final checkpoint
    ENDED = "ended"


ENDING = (Phase.STOPPING, Phase.DUMPING, Phase.ENDED)
_ENDS = (Phase.RESTARTING, Phase.STOPPING)
NEXT: dict[Phase, tuple[Phase, ...]] = {
    Phase.GATHERING: (Phase.REGROUPING, Phase.RESTORING, *_ENDS),
    Phase.REGROUPING: (Phase.REGROUPING, Phase.RESTORING, *_ENDS, Phase.ENDED),
    Phase.RESTORING: (Phase.REGROUPING, Phase.TRAINING, *_ENDS, Phase.ENDED),
    Phase.TRAINING: (Phase.REGROUPING, *_ENDS, Phase.ENDED),
    Phase.RESTARTING: (Phase.GATHERING, Phase.STOPPING, Phase.ENDED),
    Phase.STOPPING: (Phase.STOPPING, Phase.DUMPING, Phase.ENDED),
    Phase.DUMPING: (Phase.DUMPING, Phase.ENDED),
    Phase.ENDED: (),
}


# ---- commands


class Send(msgspec.Struct, frozen=True):
    """Send a message to the agent on this connection."""

    connection: int
    message: p.Message


class Record(msgspec.Struct, frozen=True):
    """Append an event to the journal (its seq and time are set by the loop)."""

    event: journal.Event


class Timer(str, enum.Enum):
    """The time limits of the machine and of the node checks in front of it."""

    LATE = "late"  # nodes that did not come are asked for
    NODE = "node"  # nodes that did not come are given up
    JOIN = "join"  # ranks that do not reach their Session, or do not take their state
    LEAVE = "leave"  # ranks that do not leave their step
    COME = "come"  # ranks outside the world that do not reach their Session
    END = "end"  # ranks that outlive SIGKILL
    DUMP = "dump"  # a final checkpoint that is not written
    APPROVAL = "approval"  # a person who does not answer
    SIGNS = "signs"  # the next look at health events
    DOUBT = "doubt"  # health events that may tell more of a fault
    LOOK = "look"  # agents that do not answer a look at their ranks
    AGAIN = "again"  # the second look at a suspect
    CHECK = "check"  # nodes that do not answer their check
    CHECK_BEGINS = "check-begins"
    EXAMINATION = "examination"  # the same, while ranks wait
    EXAMINATION_BEGINS = "examination-begins"


class SetTimer(msgspec.Struct, frozen=True):
    """Call `on_timer(timer)` after so many seconds. A time that was set before is void."""

    timer: Timer
    seconds: float


class CancelTimer(msgspec.Struct, frozen=True):
    """Forget the timer."""

    timer: Timer


class End(msgspec.Struct, frozen=True):
    """The job is over, and all agents have the message."""

    succeeded: bool


Command = Send | Record | SetTimer | CancelTimer | End


class RendezvousStore:
    """The ranks' store: where it is, or who was asked to host it."""

    def __init__(self) -> None:
        self.node = -1
        self.last = -1  # the node that hosted the newest one
        self.host = ""
        self.port = 0
        self.serial = 0
        self.asked = -1

    @property
    def is_up(self) -> bool:
        """Whether ranks can meet there."""
        return self.port > 0

    def ask(self, node: int) -> int:
        """Note that `node` starts a new store; return its serial number."""
        self.serial += 1
        self.asked = node
        return self.serial

    def came_up(self, node: int, host: str, port: int) -> None:
        """Note that the store listens."""
        self.node, self.host, self.port, self.asked = node, host, port, -1
        self.last = node

    def adopt(self, node: int, host: str, store: p.LiveStore) -> None:
        """Note that `node` hosts the store already; later stores get higher serial numbers."""
        self.serial = store.serial
        self.came_up(node, host, store.port)

    def drop(self) -> None:
        """Forget the store: it is gone, or must not be used again."""
        self.node, self.port, self.asked = -1, 0, -1

    def node_lost(self, node: int) -> None:
        """Forget the store if this node hosts it, or starts it."""
        if node in (self.node, self.asked):
            self.drop()


Report = Callable[[Fault], None]  # takes a fault: `Recovery.report`
Proceed = Callable[[], None]  # forms the next generation if all ranks wait: `Forming.proceed`


class JobState:
    """The state that several parts of the machine read and change.

    generation, restarts: the newest. newest: the newest step that a rank has finished. resumed: the
    step after which all ranks last began to train together. session: a rank of the current
    generation has a Session. sessions_seen: one of this attempt had. formed: a generation was
    formed since the last restart. newcomers: nodes taken in that have not done a step yet. devices:
    a node has devices of which health events may tell. sent_home: connections of agents that were
    told to end. tables: gives the tables of faults.
    """

    def __init__(
        self, spec: JobSpec, tables: Callable[[], Judge], attempt: int, earlier: JobHistory
    ) -> None:
        self.spec = spec
        self.tables = tables
        self.attempt = attempt
        self.phase = Phase.GATHERING
        self.generation = earlier.generation
        self.restarts = 0
        self.newest = 0
        self.resumed = 0
        self.session = self.sessions_seen = self.formed = False
        self.devices = False
        self.roster = Roster(spec)
        self.incidents = Incidents(spec.policy, earlier.incident, earlier.past)
        self.signs = HealthEventLog(earlier.signs, earlier.at)
        self.suspicions = list(earlier.suspicions)
        self.isolation = IsolatedHosts(spec.keeps_off)
        self.store = RendezvousStore()
        self.newcomers: set[int] = set()
        self.sent_home: set[int] = set()
        self._commands: list[Command] = []

    @property
    def has_begun(self) -> bool:
        """Whether this attempt has started ranks."""
        gathering = self.phase is Phase.GATHERING and not self.restarts
        return not (gathering and self.roster.all_are(Status.ABSENT))

    def enter(self, phase: Phase) -> None:
        """Change the phase, if `NEXT` allows that."""
        assert phase in NEXT[self.phase], f"{self.phase.value} is not followed by {phase.value}"
        self.phase = phase

    def do(self, command: Command) -> None:
        """Give a command."""
        self._commands.append(command)

    def record(self, event: journal.Event) -> None:
        """Have an event written to the journal."""
        self._commands.append(Record(event))

    def drain(self) -> list[Command]:
        """Return the commands since the last call."""
        commands, self._commands = self._commands, []
        return commands

    def fault(self, kind: FaultKind, rank: Rank, text: str, now: float = 0.0) -> Fault:
        """Make a fault of a rank."""
        return Fault(
            kind=kind,
            message=text,
            rank=rank.rank,
            node=rank.node,
            finished=rank.finished,
            signature=kind.value,
            at=now,
        )
