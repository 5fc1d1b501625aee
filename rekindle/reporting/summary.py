"""Summarize a job from its journal, also as Markdown; count its right findings. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from rekindle.profiling.findings import Finding, Slow
from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.faults.stragglers import Examined, Slowed, SlowOver
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.journal import (
    FAILED,
    STOPPED,
    AnyEvent,
    Checkpointed,
    CheckpointFailed,
    CheckpointLeftOut,
    Ended,
    Event,
    FaultSeen,
    FirstStep,
    Incident,
    JobStarted,
    incidents,
)
from rekindle.recovery.node_check.verdicts import SICK, Health, NodeChecked
from rekindle.reporting.event_text import (
    capital,
    milliseconds,
    outcome,
    short_row,
    sources_in_words,
)
from rekindle.words import listed

_Blamed = tuple[str, tuple[int, ...]]  # a host, and its ranks that a finding called slow


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a job. Times are seconds.

    `training_s` is wall_s less start-up, recovery and repeated steps. Goodput is its share of
    wall_s. `stepped` is False without a Session: then the steps are unknown, and goodput is None.
    `failure`: the fault that ended the job, if it failed. `left_out`: steps of checkpoints that
    were left out. `unsaved`: finished steps after the newest checkpoint, if the job has not
    succeeded.
    """

    job_id: str
    outcome: str
    reason: str
    finished: int
    attempts: int
    stepped: bool
    incidents: list[Incident]
    steps_lost: int | None
    wall_s: float
    starting_s: float
    recovering_s: float
    repeating_s: float
    failure: Fault | None
    left_out: tuple[int, ...]
    unsaved: int

    @property
    def training_s(self) -> float:
        """Return the time in which the job made progress."""
        return max(0.0, self.wall_s - self.starting_s - self.recovering_s - self.repeating_s)

    @property
    def goodput(self) -> float | None:
        """Return the share of the time in which the job made progress (ETTR); None: unknown."""
        return self.training_s / self.wall_s if self.stepped else None


def summarize(job_id: str, history: list[AnyEvent]) -> Summary:
    """Return the summary of a job's journal."""
    found = incidents(history)
    end = attempts.end_of(history)
    wall = history[-1].at - history[0].at if history else 0.0
    starting = sum(until - since for since, until in _starts(history))
    recovering = sum(until - since for since, until in _recoveries(found, history))
    finished = end.finished if end else _last_step(history)
    lost = sum(incident.steps_lost or 0 for incident in found)
    started = max((event.at for event in history if isinstance(event, JobStarted)), default=0.0)
    # An incident that ended the last attempt has cost no repeated step yet.
    past = [one for one in found if one.closed or one.detected < started]
    unknown = any(one.steps_lost is None for one in past)
    done = finished + lost
    saved = newest_checkpoint(history)
    ended_early = end is not None and end.outcome in (FAILED, STOPPED)
    moving = max(0.0, wall - starting - recovering)
    return Summary(
        job_id=job_id,
        outcome=end.outcome if end else "unfinished",
        reason=end.reason if end else "its coordinator ended before the job did",
        finished=finished,
        attempts=sum(isinstance(event, JobStarted) for event in history),
        stepped=any(isinstance(event, FirstStep) and event.step > 0 for event in history),
        incidents=found,
        steps_lost=None if unknown else lost,
        wall_s=wall,
        starting_s=starting,
        recovering_s=recovering,
        repeating_s=moving * lost / done if done else 0.0,
        failure=_failure(end, found),
        left_out=tuple(e.step for e in history if isinstance(e, CheckpointLeftOut)),
        unsaved=max(0, finished - (saved.step if saved else 0)) if ended_early else 0,
    )


def newest_checkpoint(history: Iterable[Event]) -> Checkpointed | None:
    """Return the event of the checkpoint that was written last, or None."""
    written = [event for event in history if isinstance(event, Checkpointed)]
    return written[-1] if written else None


def last_failure(history: list[AnyEvent]) -> Fault | None:
    """Return why a job that has succeeded could not write its last checkpoint; None: it could."""
    failed: Fault | None = None
    for event in attempts.newest(history):
        if isinstance(event, CheckpointFailed):
            failed = event.fault
        elif isinstance(event, Checkpointed) and failed and event.step >= failed.finished:
            failed = None
    return failed


def _starts(history: list[AnyEvent]) -> Iterable[tuple[float, float]]:
    """Yield, for each attempt, the time from the end of the previous one to its first step."""
    since: float | None = None
    before = 0.0
    for event in history:
        if isinstance(event, JobStarted) and since is None:
            since = before or event.at
        elif isinstance(event, FirstStep | Ended) and since is not None:
            yield since, event.at
            since = None
        before = event.at


def _recoveries(found: list[Incident], history: list[AnyEvent]) -> Iterable[tuple[float, float]]:
    """Yield start and end of each period of recovery from incidents, without overlaps.

    Before the first attempt's first step the job is starting, not recovering.
    """
    firsts = sorted(until for _, until in _starts(history))
    covered = firsts[0] if firsts else 0.0
    for incident in sorted(found, key=lambda incident: incident.detected):
        until = incident.first_step or _next_end(incident.detected, history)
        since = max(incident.detected, covered)
        if until > since:
            yield since, until
            covered = until


def _next_end(at: float, history: list[AnyEvent]) -> float:
    ends = (event.at for event in history if isinstance(event, Ended) and event.at >= at)
    return next(ends, history[-1].at)


def _last_step(history: list[AnyEvent]) -> int:
    return max((event.step for event in history if isinstance(event, FirstStep)), default=0)


def _failure(end: Ended | None, found: list[Incident]) -> Fault | None:
    """Return the fault of the last incident, preferably one with a traceback of the script."""
    if end is None or end.outcome != FAILED or not found:
        return None
    faults = sorted(found[-1].faults, key=lambda fault: fault.at)
    with_traceback = next((fault for fault in faults if fault.traceback), None)
    return with_traceback or found[-1].cause


def markdown_report(summary: Summary, *, resumed: str, logs: str, checkpoint: str = "") -> str:
    """Return the report as Markdown, without its picture.

    checkpoint: the newest one, as text.
    """
    parts = [
        f"# Job {summary.job_id} {outcome(summary.outcome, summary.finished)}",
        f"{capital(summary.reason)}.",
        _times(summary)
        if summary.stepped
        else "The job finished no step inside a Session, so the report has no goodput.",
        _incidents(summary.incidents),
    ]
    if summary.unsaved:
        steps = "1 step" if summary.unsaved == 1 else f"{summary.unsaved} steps"
        parts.append(
            f"The end of the job lost {steps}, which no checkpoint has. Another attempt repeats "
            "them."
        )
    if summary.left_out:
        parts.append(_left_out(summary.left_out))
    if summary.attempts > 1:
        parts.append(f"{summary.attempts} attempts. {resumed}.")
    if checkpoint:
        parts.append(f"Newest checkpoint: {checkpoint}")
    if summary.failure is not None:
        parts.append(_markdown_failure(summary.failure))
    parts.append(f"Logs of all ranks: `{logs}`")
    return "\n\n".join(parts) + "\n"


def _times(summary: Summary) -> str:
    rows = [
        ("new progress (goodput)", summary.training_s),
        ("starting", summary.starting_s),
        ("recovering", summary.recovering_s),
    ]
    if summary.repeating_s:
        number = "" if summary.steps_lost is None else f"{summary.steps_lost} "
        rows.append((f"repeating {number}lost steps", summary.repeating_s))
    rows.append(("total", summary.wall_s))
    wall = summary.wall_s or 1.0
    lines = ["| time spent | seconds | share |", "|---|---:|---:|"]
    lines += [f"| {name} | {seconds:.2f} | {seconds / wall:.1%} |" for name, seconds in rows]
    return "\n".join(lines)


def _left_out(steps: tuple[int, ...]) -> str:
    return (
        f"The job skipped {len(steps)} due checkpoints (of {listed('step', steps)}), because the "
        "store was busy. Choose a longer interval or a faster store."
    )


def _incidents(found: list[Incident]) -> str:
    if not found:
        return "No incidents."
    lines = [
        "## Incidents",
        "",
        "| # | detected | fault | strategy | took | steps lost |",
        "|---:|---|---|---|---:|---:|",
    ]
    for one in found:
        lines.append(f"| {' | '.join(str(cell) for cell in short_row(one).values())} |")
    lines.append("")
    for one in found:
        sources = sources_in_words(one.sources)
        told = (one.reason, sources and f"state: {sources}", _moments(one))
        lines.append(f"{one.number}. " + " ".join(f"{capital(each)}." for each in told if each))
    return "\n".join(lines)


def _markdown_failure(fault: Fault) -> str:
    after = f", after step {fault.finished}" if fault.finished else ""
    text = f"## First failure\n\n{capital(fault.message)}{after}."
    if not fault.traceback:
        return text
    return f"{text}\n\n```text\n{fault.traceback.rstrip()}\n```"


def _moments(one: Incident) -> str:
    """Return how long after its detection each part of a recovery was complete."""
    parts = (("regrouped", one.regrouped), ("state restored", one.restored))
    found = [
        f"{name} after {value:.0f} ms"
        for name, until in parts
        if (value := milliseconds(one.detected, until)) is not None
    ]
    return ", ".join(found)


class Precision(msgspec.Struct, frozen=True):
    """Count the findings about nodes: right, wrong, and unknown."""

    right: int = 0
    wrong: int = 0
    unknown: int = 0

    def in_words(self) -> str:
        """Return the counts as text, with the share of right ones among the known."""
        known = self.right + self.wrong
        if not known + self.unknown:
            return "no node has become slow"
        share = f"precision {self.right / known:.0%}: " if known else ""
        unknown = f", {self.unknown} unknown" if self.unknown else ""
        return f"{share}{self.right} right, {self.wrong} wrong{unknown}"


def precision(events: Iterable[Event]) -> Precision:
    """Count the outcome of each finding about a node, or a rank's own work.

    A check of the node decides it, or a later fault of its hardware. If the slowness ended without
    an action, a replacement would have been wrong.
    """
    unknown: Counter[_Blamed] = Counter()
    right = wrong = 0
    for event in events:
        match event:
            case Slowed(finding=found, hosts=hosts) if _blames(found):
                unknown.update((host, found.ranks) for host in hosts)
            case SlowOver(finding=found, hosts=hosts) if _blames(found):
                wrong += sum(unknown.pop((host, found.ranks), 0) for host in hosts)
            case Examined(host=host, verdict=verdict) | NodeChecked(host=host, verdict=verdict):
                if verdict.health in SICK:
                    right += _settle(unknown, host)
                elif verdict.health is Health.HEALTHY:
                    wrong += _settle(unknown, host)
            case FaultSeen(fault=fault) if fault.of_hardware:
                right += _settle(unknown, fault.host)
    return Precision(right, wrong, unknown.total())


def _settle(unknown: Counter[_Blamed], host: str) -> int:
    """Return the number of unknown findings about a host, and remove them."""
    return sum(unknown.pop(each) for each in list(unknown) if each[0] == host)


def _blames(found: Finding) -> bool:
    """Return whether the finding names the slow rank or node; a slow link names several ranks."""
    return found.kind in (Slow.RANK, Slow.NODE)
