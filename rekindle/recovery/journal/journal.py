"""The job's journal: events appended in order, and the incidents folded from them. Pure.

The journal is the authoritative record of a job; status pages, reports and a restarted
coordinator are folds over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from rekindle.errors import JobError
from rekindle.recovery.faults.classification import HealthEvent, explains
from rekindle.recovery.faults.fault import Fault, root_cause
from rekindle.recovery.faults.stragglers import Profiled, StragglerEvent
from rekindle.recovery.faults.tables.verdict import Urgency
from rekindle.recovery.journal.checkpoint_events import (
    Checkpointed,
    CheckpointFailed,
    CheckpointInterval,
    CheckpointLeftOut,
    CheckpointSkipped,
    CheckpointsPruned,
    Event,
)
from rekindle.recovery.node_check.verdicts import NodeChecked
from rekindle.recovery.policy.policy import Strategy

T = TypeVar("T")

__all__ = [  # what is told elsewhere too, for this is the whole journal
    "CheckpointFailed",
    "CheckpointInterval",
    "CheckpointLeftOut",
    "CheckpointSkipped",
    "Checkpointed",
    "CheckpointsPruned",
    "Event",
    "NodeChecked",
    "Profiled",
]


class JobStarted(Event, frozen=True, kw_only=True, tag="job-started"):
    """The coordinator of one attempt took up its work."""

    job_id: str
    attempt: int
    nodes: int
    processes_per_node: int
    pid: int
    spares: int = 0


class NodeJoined(Event, frozen=True, kw_only=True, tag="node-joined"):
    """An agent was taken in; node -1: as a spare. host: the machine's name."""

    node: int
    address: str
    pid: int
    host: str = ""


class NodeWanted(Event, frozen=True, kw_only=True, tag="node-wanted"):
    """The engine is asked to bring an agent for this node rank; -1: a spare."""

    node: int


class NodeLeft(Event, frozen=True, kw_only=True, tag="node-left"):
    """A node's agent is gone that nobody misses: no rank was started, or the world goes on without.

    reason: why it was sent away, if it was. replaced: another one, elsewhere, is to take its place.
    """

    node: int
    address: str
    pid: int
    reason: str = ""
    replaced: bool = False


class SpareLost(Event, frozen=True, kw_only=True, tag="spare-lost"):
    """An agent that waited as a spare is gone; left: how many still wait."""

    address: str
    pid: int
    left: int


class RanksStarted(Event, frozen=True, kw_only=True, tag="ranks-started"):
    ranks: tuple[int, ...]
    restart: int


class FaultSeen(Event, frozen=True, kw_only=True, tag="fault"):
    """A fault; it opens an incident, or belongs to the one that is open.

    known: it was seen before, and only now it is known what it was.
    """

    incident: int
    fault: Fault
    known: bool = False


class Suspected(Event, frozen=True, kw_only=True, tag="suspected"):
    """What was made after `clean` steps, by generations up to this one, may be wrong on all ranks.

    rank: the one that says so.
    """

    generation: int
    clean: int
    rank: int


class Decided(Event, frozen=True, kw_only=True, tag="decided"):
    """What is to be done about a fault.

    newest, resumed: as in `recovery.policy.history.Situation`. isolate, roll_back, approval: as in
    `recovery.policy.decide.Decision`. lighter: it is counted, but what was
    decided before tells more of the incident.
    """

    incident: int
    strategy: Strategy
    reason: str
    fault: Fault
    lighter: bool = False
    newest: int = 0
    resumed: int = 0
    roll_back: bool = False
    isolate: bool = False
    approval: bool = False


class Answered(Event, frozen=True, kw_only=True, tag="answered"):
    """A person has said whether a strategy may be used; by: who, or that nobody did in time."""

    incident: int
    strategy: Strategy
    granted: bool
    by: str


class SignSeen(Event, frozen=True, kw_only=True, tag="sign-seen"):
    """Somebody has reported a sign of trouble; urgency, explanation: what the tables say of it."""

    sign: HealthEvent
    host: str
    urgency: Urgency
    explanation: str


class Isolated(Event, frozen=True, kw_only=True, tag="isolated"):
    """The engine is asked to place nothing more on this host. incident 0: no rank has suffered."""

    incident: int
    node: int
    host: str
    reason: str


class Formed(Event, frozen=True, kw_only=True, tag="formed"):
    """A generation was formed: all ranks are there and know where their state comes from.

    step: steps finished, from which all ranks go on; made: the generation that did the last of
    them; newest: steps that all had finished before; sources: how many ranks take their state from
    where, e.g. {"self": 3, "peer": 1}; left_out: nodes that take no part.
    """

    generation: int
    world_size: int
    step: int
    sources: dict[str, int]
    newest: int
    made: int = 0
    left_out: tuple[int, ...] = ()
    incident: int = 0


class Restored(Event, frozen=True, kw_only=True, tag="restored"):
    """Every rank of the generation has its state."""

    generation: int
    incident: int = 0


class FirstStep(Event, frozen=True, kw_only=True, tag="first-step"):
    """Every rank of the generation has finished its first step; an open incident is over."""

    generation: int
    step: int
    incident: int = 0


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """Where the ranks are; streamed, not kept in the journal."""

    finished: int
    newest: int
    total: int
    metrics: dict[str, float]


class FinalCheckpoint(Event, frozen=True, kw_only=True, tag="final-checkpoint"):
    """A node writes its newest snapshot, for the job ends: its beginning, or how it came out.

    One of `path` and `error` is set at the end.
    """

    node: int
    step: int
    path: str = ""
    error: str = ""

    def in_words(self) -> str:
        """Return the state of the final checkpoint in one line."""
        if self.error:
            return f"final checkpoint: node {self.node} could not write it: {self.error}"
        if self.path:
            at = f"final checkpoint: step {self.step} is at {self.path}"
            return f"{at}; the next attempt of this job continues from it"
        return f"final checkpoint: node {self.node} writes its snapshot of step {self.step}"


# The outcomes of an attempt.
SUCCEEDED, FAILED, STOPPED = "succeeded", "failed", "stopped"
RESCHEDULED = "rescheduled"  # another attempt follows at once


class Stopping(Event, frozen=True, kw_only=True, tag="stopping"):
    """The ranks are being ended; outcome: as in `Ended`. A later one says how else it will end."""

    reason: str
    outcome: str = STOPPED


class Ended(Event, frozen=True, kw_only=True, tag="ended"):
    """The attempt is over: `outcome` is succeeded, failed, stopped, or rescheduled.

    After the last, whoever steers the job starts the next attempt.
    """

    outcome: str
    reason: str
    finished: int


AnyEvent = (
    JobStarted
    | NodeJoined
    | NodeWanted
    | NodeLeft
    | SpareLost
    | RanksStarted
    | FaultSeen
    | Suspected
    | Decided
    | Answered
    | SignSeen
    | Isolated
    | NodeChecked
    | Profiled
    | StragglerEvent
    | Formed
    | Restored
    | FirstStep
    | Checkpointed
    | CheckpointFailed
    | CheckpointSkipped
    | CheckpointLeftOut
    | CheckpointInterval
    | CheckpointsPruned
    | Progress
    | FinalCheckpoint
    | Stopping
    | Ended
)


class Incident(msgspec.Struct, kw_only=True):
    """A fault and all that was done about it; times are seconds since the epoch, 0 = not yet."""

    number: int
    faults: list[Fault] = []
    strategies: list[Strategy] = []
    reason: str = ""
    generation: int = 0
    detected: float = 0.0
    decided: float = 0.0
    regrouped: float = 0.0
    restored: float = 0.0
    first_step: float = 0.0
    resumed_at: int = 0
    steps_lost: int = 0
    sources: dict[str, int] = {}

    @property
    def closed(self) -> bool:
        """Whether training went on."""
        return self.first_step > 0

    @property
    def cause(self) -> Fault:
        """The fault that most likely caused the others."""
        return root_cause(self.faults)

    @property
    def strategy(self) -> Strategy | None:
        """What was done in the end."""
        return self.strategies[-1] if self.strategies else None


class IncidentFold:
    """The incidents of a journal by number, as its events come."""

    def __init__(self) -> None:
        self.by_number: dict[int, Incident] = {}

    def add(self, event: Event) -> Incident | None:
        """Take the next event. Return its incident; None: it belongs to none."""
        number = getattr(event, "incident", 0)
        if not number:
            return None
        new = Incident(number=number, faults=[], strategies=[])
        incident = self.by_number.setdefault(number, new)
        _apply(incident, event)
        return incident


def incidents(events: Iterable[Event]) -> list[Incident]:
    """Return the incidents of a journal, oldest first."""
    found = IncidentFold()
    for event in events:
        found.add(event)
    return [found.by_number[number] for number in sorted(found.by_number)]


def _apply(incident: Incident, event: Event) -> None:
    match event:
        case FaultSeen(fault=fault, known=True):
            seen = incident.faults
            incident.faults = [fault if explains(fault, each) else each for each in seen]
        case FaultSeen(fault=fault):
            incident.faults.append(fault)
            incident.detected = incident.detected or event.at
        case Decided(strategy=strategy, reason=reason, lighter=False):
            incident.strategies.append(strategy)
            incident.reason = reason
            incident.decided = event.at
        case Formed():
            incident.generation = event.generation
            incident.regrouped = event.at
            incident.resumed_at = event.step
            incident.steps_lost = max(0, event.newest - event.step)
            incident.sources = event.sources
        case Restored():
            incident.restored = event.at
        case FirstStep():
            incident.first_step = event.at
        case CheckpointFailed(fault=fault):
            incident.faults.append(fault)
            incident.reason = f"{fault.message}; training goes on"
            incident.detected = incident.first_step = event.at
            incident.resumed_at = fault.finished
        case NodeChecked(fault=Fault() as fault):
            incident.faults.append(fault)
            incident.reason = f"{fault.message}; another node is asked for"
            incident.detected = incident.first_step = event.at
        case _:
            pass


def waits_for_approval(events: Iterable[Event]) -> Decided | None:
    """Return the decision that a person has yet to approve, if there is one."""
    open_: Decided | None = None
    for event in events:
        if isinstance(event, Decided):
            open_ = event if event.approval else None
        elif isinstance(event, Answered | Stopping | Ended):
            open_ = None
    return open_


_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """Encode one event as a JSON line without its newline."""
    return msgspec.json.encode(event)


def decode(line: bytes | str) -> AnyEvent:
    """Decode one JSON line. Raises msgspec.DecodeError when it is none of ours."""
    return _DECODER.decode(line)


def encode_all(events: Iterable[Event]) -> bytes:
    """Encode events as the lines of a journal."""
    return b"".join(encode(event) + b"\n" for event in events)


def read(lines: Iterable[bytes]) -> list[AnyEvent]:
    """Decode a journal. Raises JobError: a line is no event that this version knows."""
    return read_lines(lines, decode, "the job's journal")


def read_lines(lines: Iterable[bytes], decode_line: Callable[[bytes], T], what: str) -> list[T]:
    """Decode the lines of a file, without the last one if its writer was killed in it.

    what: names the file in the error. Raises JobError: another line cannot be decoded.
    """
    kept = [line for line in lines if line.strip()]
    found = []
    for number, line in enumerate(kept, 1):
        try:
            found.append(decode_line(line))
        except msgspec.DecodeError as error:
            if number != len(kept):
                raise JobError(f"line {number} of {what}: {error}") from error
    return found
