"""The job's events as sentences, and its incidents as rows: what people read. Pure."""

from __future__ import annotations

import math
from datetime import datetime, timezone

from rekindle import names
from rekindle.recovery.faults.stragglers import Examined, Slowed, SlowOver
from rekindle.recovery.journal.journal import (
    Answered,
    AnyEvent,
    Checkpointed,
    CheckpointFailed,
    CheckpointInterval,
    CheckpointLeftOut,
    CheckpointSkipped,
    CheckpointsPruned,
    Decided,
    Ended,
    FaultSeen,
    FirstStep,
    Formed,
    Incident,
    Isolated,
    JobStarted,
    LastWords,
    NodeChecked,
    NodeJoined,
    NodeLeft,
    NodeWanted,
    Profiled,
    Progress,
    RanksStarted,
    Restored,
    SignSeen,
    SpareLost,
    Stopping,
    Suspected,
)
from rekindle.words import listed, size


def sentence(event: AnyEvent) -> str:
    """Say in one line what happened."""
    return capital(_sentence(event))


def _sentence(event: AnyEvent) -> str:
    match event:
        case JobStarted():
            world = f"{event.nodes} nodes x {event.processes_per_node} ranks"
            return f"attempt {event.attempt} begins: {world}; coordinator is process {event.pid}"
        case NodeJoined() | NodeLeft() | NodeWanted() | SpareLost():
            return _node_sentence(event)
        case RanksStarted():
            return f"started: {listed('rank', event.ranks)}"
        case Checkpointed() | CheckpointFailed() | CheckpointSkipped() | CheckpointLeftOut():
            return _checkpoint_sentence(event)
        case CheckpointInterval():
            return event.in_words()
        case CheckpointsPruned():
            return event.in_words()
        case Progress():
            return f"step {event.finished} of {event.total}"
        case LastWords() | NodeChecked() | Profiled() | Slowed() | SlowOver() | Examined():
            return event.in_words()
        case Stopping():
            return f"the job is being stopped: {event.reason}"
        case Ended():
            return f"the job {outcome(event.outcome, event.finished)}: {event.reason}"
        case _:
            return _recovery_sentence(event)


def _checkpoint_sentence(
    event: Checkpointed | CheckpointFailed | CheckpointSkipped | CheckpointLeftOut,
) -> str:
    match event:
        case Checkpointed():
            cost = f"{size(event.bytes)} in {event.seconds:.2f} s"
            return f"checkpoint of step {event.step} is at {event.path} ({cost})"
        case CheckpointFailed():
            return f"incident {event.incident}: {event.fault.message}; training goes on"
        case CheckpointSkipped():
            return f"checkpoint {event.path} is passed over: {event.reason}"
        case CheckpointLeftOut():
            return event.in_words()


def _node_sentence(event: NodeJoined | NodeLeft | NodeWanted | SpareLost) -> str:
    match event:
        case NodeLeft():
            why = f", for {event.reason}" if event.reason else ", and the job goes on without it"
            return f"node {event.node} ({event.address}) has left{why}"
        case NodeJoined(node=names.SPARE):
            return f"a spare comes from {event.address}; its agent is process {event.pid}"
        case NodeJoined():
            return f"node {event.node} joins from {event.address}; its agent is process {event.pid}"
        case NodeWanted(node=names.SPARE):
            return "a new spare is wanted"
        case SpareLost():
            return (
                f"the spare at {event.address} (process {event.pid}) is lost; {event.left} are left"
            )
        case NodeWanted():
            return f"a new agent is wanted for node {event.node}"


def _recovery_sentence(
    event: FaultSeen
    | Suspected
    | Decided
    | Answered
    | SignSeen
    | Isolated
    | Formed
    | Restored
    | FirstStep,
) -> str:
    if isinstance(event, SignSeen):
        gone = " is over" if event.sign.gone else ""
        return f"{event.sign.in_words()}{gone}: {event.explanation}"
    if isinstance(event, Suspected):
        return f"rank {event.rank} says that what was made after step {event.clean} may be wrong"
    prefix = f"incident {event.incident}: " if event.incident else ""
    match event:
        case FaultSeen():
            return f"{prefix}{event.fault.message}"
        case Decided():
            return f"{prefix}{event.strategy.value}: {event.reason}"
        case Answered():
            said = "approved" if event.granted else "not approved"
            return f"{prefix}{event.strategy.value} was {said} by {event.by}"
        case Isolated():
            return f"{prefix}nothing is placed on {event.host} any more"
        case Formed():
            begins = f"goes on after step {event.step}" if event.step else "begins at step 0"
            return (
                f"{prefix}generation {event.generation} of {event.world_size} ranks {begins}; "
                f"state: {sources_in_words(event.sources)}"
            )
        case Restored():
            return f"{prefix}all ranks of generation {event.generation} have their state"
        case FirstStep(step=0):
            return f"{prefix}all ranks run again"
        case FirstStep():
            return f"{prefix}all ranks have finished step {event.step}"


def outcome(word: str, finished: int) -> str:
    """Return e.g. "succeeded after 300 steps"; a script without Session tells no steps."""
    return f"{word} after {finished} steps" if finished else word


def sources_in_words(sources: dict[str, int]) -> str:
    """Say where the ranks' state comes from, e.g. "3 x own memory, 1 x peer"."""
    return ", ".join(f"{n} x {_SOURCES.get(name, name)}" for name, n in sources.items() if n)


_SOURCES = {
    "self": "own memory",
    "peer": "another rank",
    "snapshot": "snapshot",
    "neighbour": "a neighbour's copy",
    "checkpoint": "checkpoint",
    "fresh": "built anew",
    "script": "left to the script",
}


def capital(text: str) -> str:
    """Return the text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def clock(at: float) -> str:
    """Return a time of the day in UTC, to the millisecond; a dash if it never came."""
    if not at:
        return "-"
    return datetime.fromtimestamp(at, tz=timezone.utc).strftime("%H:%M:%S.%f")[:-3]


def milliseconds(since: float, until: float) -> float | None:
    """Return the time between two moments in milliseconds; None if one of them never came."""
    if not since or not until:
        return None
    return round((until - since) * 1000, 1)


def incident_row(incident: Incident) -> dict[str, str | int | float | None]:
    """Return the incident as a row of the incident table; times of its parts are milliseconds."""
    return {
        "incident": incident.number,
        "detected (UTC)": clock(incident.detected),
        "fault": incident.cause.kind.value,
        "blamed": incident.cause.blamed(),
        "strategy": " > ".join(strategy.value for strategy in incident.strategies) or "-",
        "total ms": milliseconds(incident.detected, incident.first_step),
        "steps lost": incident.steps_lost,
        "reason": incident.reason,
        "generation": incident.generation,
        "decide ms": milliseconds(incident.detected, incident.decided),
        "regroup ms": milliseconds(incident.decided, incident.regrouped),
        "restore ms": milliseconds(incident.regrouped, incident.restored),
        "first good step ms": milliseconds(incident.restored, incident.first_step),
    }


def progress_in_words(event: Progress) -> str:
    """Say where the job is, with its newest metrics."""
    values = (f"{name} {value:.4g}" for name, value in sorted(event.metrics.items()))
    return " · ".join((f"step {event.finished} of {event.total}", *values))


def percent(event: Progress) -> float:
    """Return how much of the job is done, rounded down so that only its end is 100."""
    if event.total <= 0:
        return 0.0
    return math.floor(1000 * min(event.finished, event.total) / event.total) / 10
