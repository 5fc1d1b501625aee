"""Format a job's events as sentences, and its incidents as rows of a table. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from rekindle import names
from rekindle.profiling.findings import Slow
from rekindle.recovery.faults.stragglers import Examined, Slowed, SlowOver
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import (
    OF_SCRIPT,
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
    FinalCheckpoint,
    FirstStep,
    Formed,
    HealthEventSeen,
    Incident,
    Isolated,
    JobStarted,
    Moved,
    MoveEnded,
    MoveLate,
    MoveRequested,
    NodeChecked,
    NodeJoined,
    NodeLeft,
    NodeWanted,
    Profiled,
    Progress,
    RanksDiffer,
    RanksStarted,
    ResetSkipped,
    Restored,
    SpareLost,
    StepSkipped,
    Stopping,
    Suspected,
)
from rekindle.recovery.journal.node_events import move_in_words
from rekindle.words import known, listed, size

_SOURCES = {
    "self": ("kept", ""),
    "peer": ("received", "from a peer"),
    "snapshot": ("read", "from a snapshot"),
    "replica": ("read", "from a replica on another node"),
    "checkpoint": ("read", "from a checkpoint"),
    "fresh": ("built", ""),
    OF_SCRIPT: ("left", "to the script"),
}


def sentence(event: AnyEvent) -> str:
    """Return the event in one line that starts with a capital letter."""
    return capital(words(event))


def level(event: AnyEvent) -> int:
    """Return the logging level of an event. A terminal shows INFO and above; a flow logs all."""
    match event:
        case FaultSeen() | CheckpointFailed() | CheckpointSkipped() | CheckpointLeftOut():
            return logging.WARNING
        case RanksDiffer() | ResetSkipped() | StepSkipped():
            return logging.WARNING
        case CheckpointsPruned():
            return logging.WARNING if event.error else logging.DEBUG
        case Slowed():
            return logging.DEBUG if event.finding.kind is Slow.UNEVEN else logging.WARNING
        case Decided():
            return logging.DEBUG if event.outweighed else logging.INFO
        case Formed():
            return logging.INFO if event.incident or event.step else logging.DEBUG
        case NodeLeft():
            return logging.INFO if event.reason else logging.DEBUG
        case MoveRequested() | MoveLate() | Moved() | MoveEnded():
            return logging.INFO
        case Answered() | CheckpointInterval() | Isolated() | FinalCheckpoint() | NodeChecked():
            return logging.INFO
        case _:
            return logging.DEBUG


def words(event: AnyEvent) -> str:
    """Return the event in one line."""
    match event:
        case JobStarted():
            world = f"{event.nodes} nodes x {event.processes_per_node} ranks"
            return f"attempt {event.attempt} begins: {world}; coordinator: process {event.pid}"
        case NodeJoined() | NodeLeft() | NodeWanted() | SpareLost():
            return _node_sentence(event)
        case MoveRequested() | MoveLate() | Moved() | MoveEnded():
            return move_in_words(event)
        case RanksStarted():
            return f"{listed('rank', event.ranks)} started"
        case Checkpointed() | CheckpointFailed() | CheckpointSkipped():
            return _checkpoint_sentence(event)
        case Progress():
            return f"step {event.finished} of {event.total}"
        case (
            CheckpointLeftOut()
            | CheckpointInterval()
            | CheckpointsPruned()
            | FinalCheckpoint()
            | NodeChecked()
            | Profiled()
            | ResetSkipped()
            | Slowed()
            | SlowOver()
            | Examined()
        ):
            return event.in_words()
        case RanksDiffer():
            return (
                f"{listed('rank', event.ranks)} hold different values of {event.item} after step "
                f"{event.step}; a replaced rank would get those of another rank"
            )
        case StepSkipped():
            return f"incident {event.incident}: {event.fault.message}; training continues"
        case Stopping():
            return f"the job stops: {event.reason}"
        case Ended():
            return f"the job {outcome(event.outcome, event.finished)}: {event.reason}"
        case _:
            return _recovery_sentence(event)


def _checkpoint_sentence(event: Checkpointed | CheckpointFailed | CheckpointSkipped) -> str:
    match event:
        case Checkpointed():
            cost = f"{size(event.bytes)} in {event.seconds:.2f} s"
            return f"checkpoint of step {event.step} is at {event.path} ({cost})"
        case CheckpointFailed():
            return f"incident {event.incident}: {event.fault.message}; training continues"
        case CheckpointSkipped():
            return f"the restart skips checkpoint {event.path}: {event.reason}"


def _node_sentence(event: NodeJoined | NodeLeft | NodeWanted | SpareLost) -> str:
    match event:
        case NodeLeft(node=names.SPARE):
            return f"the spare node at {event.address} left: {event.reason}"
        case NodeLeft():
            reason = event.reason or "the job continues without it"
            return f"node {event.node} ({event.address}) left: {reason}"
        case NodeJoined(node=names.SPARE):
            return f"a spare node joins from {event.address}; its agent is process {event.pid}"
        case NodeJoined():
            return f"node {event.node} joins from {event.address}; its agent is process {event.pid}"
        case NodeWanted(node=names.SPARE):
            return "the job needs another spare node"
        case SpareLost():
            agent = f"the spare node at {event.address} (process {event.pid})"
            return f"the job lost {agent}; {event.left} are left"
        case NodeWanted():
            return f"the job needs a new agent for node {event.node}"


def _recovery_sentence(
    event: FaultSeen
    | Suspected
    | Decided
    | Answered
    | HealthEventSeen
    | Isolated
    | Formed
    | Restored
    | FirstStep,
) -> str:
    if isinstance(event, HealthEventSeen):
        gone = " is over" if event.health_event.gone else ""
        return f"{event.health_event.in_words()}{gone}: {event.explanation}"
    if isinstance(event, Suspected):
        return (
            f"rank {event.rank} reports that its state after step {event.valid_steps} may be wrong"
        )
    prefix = f"incident {event.incident}: " if event.incident else ""
    match event:
        case FaultSeen():
            return f"{prefix}{event.fault.message}"
        case Decided():
            return f"{prefix}{event.strategy.value}: {event.reason}"
        case Answered():
            verb = "approved" if event.granted else "refused"
            return f"{prefix}{event.by} {verb} {event.strategy.value}"
        case Isolated():
            return f"{prefix}the job no longer uses the host {event.host}"
        case Formed():
            verb = f"continues after step {event.step}" if event.step else "begins at step 0"
            if event.incident and not event.step:
                verb = "begins again at step 0, because no state of a later step is left"
            world = f"generation {event.generation}, world size {event.world_size}"
            return f"{prefix}training {verb}: {sources_in_words(event.sources)} ({world})"
        case Restored():
            return f"{prefix}all ranks of generation {event.generation} have their state"
        case FirstStep(step=0):
            return f"{prefix}all ranks run again"
        case FirstStep():
            return f"{prefix}all ranks finished step {event.step}"


def outcome(word: str, finished: int) -> str:
    """Return e.g. "succeeded after 300 steps", or only the word if no step is known."""
    return f"{word} after {finished} steps" if finished else word


def sources_in_words(sources: dict[str, int]) -> str:
    """Return the sources of the ranks' state.

    Example: "3 ranks kept their state, 1 received it from a peer".
    """
    parts: list[str] = []
    for source, count in sources.items():
        if count:
            verb, origin = _SOURCES.get(source, ("read", f"from {source}"))
            ranks = ("rank" if count == 1 else "ranks") if not parts else ""
            state = ("its state" if count == 1 else "their state") if not parts else "it"
            parts.append(" ".join(filter(None, (str(count), ranks, verb, state, origin))))
    return ", ".join(parts)


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def clock(at: float) -> str:
    """Return date and time to the millisecond, with the offset of UTC; a dash for 0."""
    if not at:
        return "-"
    return datetime.fromtimestamp(at, tz=timezone.utc).isoformat(" ", "milliseconds")


def milliseconds(since: float, until: float) -> float | None:
    """Return the time between two moments in milliseconds; None if one of them is 0."""
    if not since or not until:
        return None
    return round((until - since) * 1000, 1)


def incident_row(incident: Incident) -> dict[str, str | int | float | None]:
    """Return the incident as a row of the incident table; times of its parts are milliseconds."""
    return {
        "incident": incident.number,
        "detected": clock(incident.detected),
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


def short_row(incident: Incident) -> dict[str, str | int]:
    """Return the incident as a row of a table in Prefect, which shows about 70 characters."""
    took = milliseconds(incident.detected, incident.first_step)
    return {
        "#": incident.number,
        "detected": clock(incident.detected)[5:19] + clock(incident.detected)[23:],
        "fault": f"{incident.cause.kind.value}, {incident.cause.blamed().partition(' on ')[0]}",
        "strategy": str(incident_row(incident)["strategy"]),
        "took": "-" if took is None else f"{took / 1000:.2f} s",
        "lost": known(incident.steps_lost),
    }


def progress_in_words(event: Progress) -> str:
    """Return the progress of a job, with its newest metrics."""
    values = (f"{name} {value:.4g}" for name, value in sorted(event.metrics.items()))
    return " · ".join((f"step {event.finished} of {event.total}", *values))


def percent(event: Progress) -> float:
    """Return the percentage of finished steps, rounded down, so that only the end gives 100."""
    if event.total <= 0:
        return 0.0
    return math.floor(1000 * min(event.finished, event.total) / event.total) / 10


def resumes(attempt: Sequence[AnyEvent]) -> bool:
    """Return whether this attempt's first generation continues earlier work, or could not."""
    formed = _first_formed(attempt)
    return formed is not None and (formed.step > 0 or bool(skipped_checkpoints(attempt)))


def resumed_text(history: Sequence[AnyEvent]) -> str:
    """Return the step and the state from which the newest attempt continues."""
    formed = _first_formed(attempts.newest(history))
    number = attempts.number(history)
    if formed is None or formed.step == 0:
        return f"Attempt {number} begins at step 0"
    source = sources_in_words(formed.sources)
    paths = (e.path for e in history if isinstance(e, Checkpointed) and e.step == formed.step)
    path = next(paths, "")
    where = f" ({path})" if path else ""
    return f"Attempt {number} resumes after step {formed.step}: {source}{where}"


def skipped_checkpoints(attempt: Iterable[AnyEvent]) -> list[CheckpointSkipped]:
    """Return the checkpoints that the attempt could not use."""
    return [event for event in attempt if isinstance(event, CheckpointSkipped)]


def _first_formed(attempt: Iterable[AnyEvent]) -> Formed | None:
    return next((event for event in attempt if isinstance(event, Formed)), None)
