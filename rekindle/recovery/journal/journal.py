"""Define the job's journal: events in order, and the incidents folded from them. Pure.

The journal is the authoritative record of a job. Status pages, reports and a restarted coordinator
are folds over it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle.recovery.faults.classification import explains
from rekindle.recovery.faults.fault import Fault, FaultKind, root_cause
from rekindle.recovery.faults.stragglers import Profiled, StragglerEvent
from rekindle.recovery.journal.checkpoint_events import (
    Checkpointed,
    CheckpointFailed,
    CheckpointInterval,
    CheckpointLeftOut,
    CheckpointSkipped,
    CheckpointsPruned,
    FinalCheckpoint,
)
from rekindle.recovery.journal.event import Event, read_lines
from rekindle.recovery.journal.node_events import (
    HealthEventSeen,
    Isolated,
    Moved,
    MoveEnded,
    MoveEvent,
    MoveLate,
    MoveRequested,
    NodeJoined,
    NodeLeft,
    NodeWanted,
    ResetSkipped,
    SpareLost,
)
from rekindle.recovery.node_check.verdicts import NodeChecked
from rekindle.recovery.policy.policy import Strategy

__all__ = [  # includes events from other modules, because this is the complete journal
    "CheckpointFailed",
    "CheckpointInterval",
    "CheckpointLeftOut",
    "CheckpointSkipped",
    "Checkpointed",
    "CheckpointsPruned",
    "Event",
    "FinalCheckpoint",
    "HealthEventSeen",
    "Isolated",
    "MoveEnded",
    "MoveEvent",
    "MoveLate",
    "MoveRequested",
    "Moved",
    "NodeChecked",
    "NodeJoined",
    "NodeLeft",
    "NodeWanted",
    "Profiled",
    "ResetSkipped",
    "SpareLost",
]

# The outcomes of an attempt.
SUCCEEDED, FAILED, STOPPED = "succeeded", "failed", "stopped"
OF_SCRIPT = "script"  # the source of the state of ranks without a Session
UNKNOWN = -1  # finished steps that no coordinator has seen
RESCHEDULED = "rescheduled"  # another attempt follows immediately


class JobStarted(Event, frozen=True, kw_only=True, tag="job-started"):
    """Record that the coordinator of one attempt started its work."""

    job_id: str
    attempt: int
    nodes: int
    processes_per_node: int
    pid: int
    spares: int = 0


class RanksStarted(Event, frozen=True, kw_only=True, tag="ranks-started"):
    ranks: tuple[int, ...]
    restart: int


class FaultSeen(Event, frozen=True, kw_only=True, tag="fault"):
    """Record a fault; it opens an incident, or belongs to the open one.

    `explained` means that the fault was seen before, and its cause became known now. `since` is the
    time of the last event before a fault that no coordinator has seen.
    """

    incident: int
    fault: Fault
    explained: bool = False
    since: float = 0.0


class Suspected(Event, frozen=True, kw_only=True, tag="suspected"):
    """Record that states after `valid_steps` steps, of generations up to this one, may be invalid.

    This concerns all ranks. `rank` is the rank that reported it.
    """

    generation: int
    valid_steps: int
    rank: int


class RanksDiffer(Event, frozen=True, kw_only=True, tag="ranks-differ"):
    """Record once that ranks hold different values of an object after this step.

    A replaced rank gets the values of another rank. `item` is the name of the object.
    """

    item: str
    step: int
    ranks: tuple[int, ...]


class StepSkipped(Event, frozen=True, kw_only=True, tag="step-skipped"):
    """Record a step that all ranks skipped, because its update would have damaged the model.

    It is an incident of its own; training continues.
    """

    incident: int
    fault: Fault


class Decided(Event, frozen=True, kw_only=True, tag="decided"):
    """Record the decision about a fault.

    `newest` and `resumed` are as in `recovery.policy.history.Situation`. `isolate`, `roll_back`,
    `approval` and `apart` are as in `recovery.policy.decide.Decision`. `outweighed` means
    that the decision counts, but an earlier decision describes the incident better.
    """

    incident: int
    strategy: Strategy
    reason: str
    fault: Fault
    outweighed: bool = False
    newest: int = 0
    resumed: int = 0
    roll_back: bool = False
    isolate: bool = False
    approval: bool = False
    apart: bool = False


class Answered(Event, frozen=True, kw_only=True, tag="answered"):
    """Record a person's answer on a strategy.

    `by` is the person, or states that no person answered in time.
    """

    incident: int
    strategy: Strategy
    granted: bool
    by: str


class Formed(Event, frozen=True, kw_only=True, tag="formed"):
    """Record a new generation: all ranks are present and know the source of their state.

    `step` is the number of finished steps from which all ranks continue. `state_generation` did
    the last of them. `newest` is the number of steps that all ranks had finished before, or
    UNKNOWN.
    `sources` counts the ranks by source of their state, e.g. {"self": 3, "peer": 1}. `left_out`
    holds nodes outside this generation.
    """

    generation: int
    world_size: int
    step: int
    sources: dict[str, int]
    newest: int
    state_generation: int = 0
    left_out: tuple[int, ...] = ()
    incident: int = 0


class Restored(Event, frozen=True, kw_only=True, tag="restored"):
    """Record that every rank of the generation has its state."""

    generation: int
    incident: int = 0


class FirstStep(Event, frozen=True, kw_only=True, tag="first-step"):
    """Record the first finished step of every rank of the generation; the open incident ends."""

    generation: int
    step: int
    incident: int = 0


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """Report the progress of the ranks; the journal does not keep this event."""

    finished: int
    newest: int
    total: int
    metrics: dict[str, float]


class Stopping(Event, frozen=True, kw_only=True, tag="stopping"):
    """Record that the ranks are being ended; `outcome` is as in `Ended`.

    A later event of this type replaces the outcome.
    """

    reason: str
    outcome: str = STOPPED


class Ended(Event, frozen=True, kw_only=True, tag="ended"):
    """Record the end of the attempt: `outcome` is succeeded, failed, stopped, or rescheduled.

    After `rescheduled`, the engine starts the next attempt.
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
    | RanksDiffer
    | StepSkipped
    | Decided
    | Answered
    | HealthEventSeen
    | ResetSkipped
    | Isolated
    | MoveEvent
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
    """Hold a fault and its recovery; times are seconds since the epoch, 0 = not yet."""

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
    steps_lost: int | None = None  # finished steps to repeat; None: unknown, as without a Session
    sources: dict[str, int] = {}

    @property
    def closed(self) -> bool:
        """Return whether training continued."""
        return self.first_step > 0

    @property
    def planned(self) -> bool:
        """Return whether it is a planned move of a node, and not a failure."""
        return bool(self.faults) and self.cause.kind is FaultKind.PLANNED

    @property
    def cause(self) -> Fault:
        """Return the fault that most likely caused the others."""
        return root_cause(self.faults)

    @property
    def strategy(self) -> Strategy | None:
        """Return the last strategy."""
        return self.strategies[-1] if self.strategies else None


class IncidentFold:
    """Fold the incidents of a journal, by number, as events arrive."""

    def __init__(self) -> None:
        self.by_number: dict[int, Incident] = {}
        self._finished = 0  # steps of the attempt that has ended
        self._moving: list[Incident] = []  # moves whose ranks have not finished a step yet

    def add(self, event: Event) -> Incident | None:
        """Add the next event; return its incident, or None."""
        if isinstance(event, Formed | Restored | FirstStep):
            self._follow_moves(event)
        if isinstance(event, Ended):
            self._finished = event.finished
            for move in [i for i in self.by_number.values() if i.planned]:
                _end_move(move, event.at)
        elif isinstance(event, Formed) and OF_SCRIPT not in event.sources:
            self._settle(event)
        number = getattr(event, "incident", 0)
        if not number:
            return None
        incident = self.by_number.setdefault(number, Incident(number=number))
        _apply(incident, event)
        if isinstance(event, Moved):
            self._moving.append(incident)
        return incident

    def _follow_moves(self, event: Formed | Restored | FirstStep) -> None:
        """Add an event of the next generation to the moves of nodes that led to it.

        The event itself has the number of a fault that is open at the same time, or none.
        """
        for move in self._moving:
            _apply(move, event)
        if isinstance(event, FirstStep):
            self._moving = []

    def _settle(self, formed: Formed) -> None:
        """Set the lost steps of earlier incidents, after which no generation had a Session."""
        waiting = [one for one in self.by_number.values() if one.steps_lost is None]
        for one in waiting:
            one.steps_lost = 0
        if waiting and not formed.incident:
            waiting[-1].steps_lost = max(0, max(formed.newest, self._finished) - formed.step)
        self._finished = 0


def incidents(events: Iterable[Event]) -> list[Incident]:
    """Return the incidents of a journal, the oldest first."""
    found = IncidentFold()
    for event in events:
        found.add(event)
    return [found.by_number[number] for number in sorted(found.by_number)]


def _end_move(move: Incident, at: float) -> None:
    """Close a move that is not over when its attempt ends."""
    if not move.closed:
        move.reason = f"{move.reason}; the attempt ended first"
        move.detected = move.first_step = at


def _apply(incident: Incident, event: Event) -> None:
    match event:
        case FaultSeen(fault=fault, explained=True):
            faults = incident.faults
            incident.faults = [fault if explains(fault, each) else each for each in faults]
        case FaultSeen(fault=fault):
            incident.faults.append(fault)
            incident.detected = incident.detected or event.since or event.at
        case Decided(strategy=strategy, reason=reason, outweighed=False):
            incident.strategies.append(strategy)
            incident.reason = reason
            incident.decided = event.at
        case Formed():
            incident.generation = event.generation
            incident.regrouped = event.at
            incident.resumed_at = event.step
            known = OF_SCRIPT not in event.sources and event.newest != UNKNOWN
            incident.steps_lost = max(0, event.newest - event.step) if known else None
            incident.sources = event.sources
        case Restored():
            incident.restored = event.at
        case FirstStep():
            incident.first_step = event.at
            if not incident.generation:  # all ranks continued
                incident.steps_lost = 0
        case MoveRequested(fault=fault):
            incident.faults.append(fault)
            incident.reason = fault.message
            incident.detected = event.at
            incident.steps_lost = 0
        case Moved():
            incident.detected = incident.decided = event.began or event.at
        case MoveEnded():
            incident.reason = f"{incident.reason}; {event.reason}"
            incident.detected = incident.first_step = event.at
        case (
            CheckpointFailed(fault=fault)
            | StepSkipped(fault=fault)
            | NodeChecked(fault=Fault() as fault)
        ):
            node = isinstance(event, NodeChecked)
            what = "the job requests another node" if node else "training continues"
            incident.faults.append(fault)
            incident.reason = f"{fault.message}; {what}"
            incident.detected = incident.first_step = event.at
            incident.resumed_at = fault.finished
            incident.steps_lost = 0


_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """Encode one event as a JSON line without its newline."""
    return msgspec.json.encode(event)


def decode(line: bytes | str) -> AnyEvent:
    """Decode one JSON line. Raises msgspec.DecodeError: it is not an event of this version."""
    return _DECODER.decode(line)


def encode_all(events: Iterable[Event]) -> bytes:
    """Encode events as the lines of a journal."""
    return b"".join(encode(event) + b"\n" for event in events)


def read(lines: Iterable[bytes]) -> list[AnyEvent]:
    """Decode a journal. Raises JobError: a line is not an event of this version."""
    return read_lines(lines, decode, "the job's journal")
