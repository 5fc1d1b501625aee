"""The report of a job in markdown. Pure."""

from __future__ import annotations

from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.journal.journal import Incident
from rekindle.reporting.event_text import capital, clock, milliseconds, outcome, sources_in_words
from rekindle.reporting.summary import Summary


def markdown_report(summary: Summary, *, resumed: str, logs: str) -> str:
    """Return the report as markdown, without its picture."""
    parts = [
        f"# Job {summary.job_id} {outcome(summary.outcome, summary.finished)}",
        f"{capital(summary.reason)}.",
        _times(summary)
        if summary.stepped
        else "No step was finished inside a Session, so there is no goodput to tell.",
        _incidents(summary.incidents),
    ]
    if summary.left_out:
        parts.append(_left_out(summary.left_out))
    if summary.attempts > 1:
        parts.append(f"{summary.attempts} attempts. {resumed}.")
    if summary.failure is not None:
        parts.append(_failure(summary.failure))
    parts.append(f"Logs of all ranks: `{logs}`")
    return "\n\n".join(parts) + "\n"


def _times(summary: Summary) -> str:
    rows = [
        ("coming forward (goodput)", summary.training_s),
        ("starting", summary.starting_s),
        ("recovering", summary.recovering_s),
    ]
    if summary.steps_lost:
        rows.append((f"doing {summary.steps_lost} lost steps again", summary.repeating_s))
    rows.append(("in all", summary.wall_s))
    wall = summary.wall_s or 1.0
    lines = ["| time spent | seconds | share |", "|---|---:|---:|"]
    lines += [f"| {name} | {seconds:.2f} | {seconds / wall:.1%} |" for name, seconds in rows]
    return "\n".join(lines)


def _left_out(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:20])) + (", ..." if len(steps) > 20 else "")
    return (
        f"Checkpoints that were due and left out, for the store was busy: {len(steps)} "
        f"(of steps {shown}). A longer interval or a faster store would keep what was asked for."
    )


def _incidents(found: list[Incident]) -> str:
    if not found:
        return "No incidents."
    lines = [
        "## Incidents",
        "",
        "| # | detected (UTC) | fault | strategy | regrouped | restored | first good step | "
        "steps lost | state from |",
        "|---:|---|---|---|---:|---:|---:|---:|---|",
    ]
    for one in found:
        cells = (
            str(one.number),
            clock(one.detected),
            f"{one.cause.kind.value}, {one.cause.blamed()}",
            " > ".join(strategy.value for strategy in one.strategies) or "-",
            _ms(one.detected, one.regrouped),
            _ms(one.detected, one.restored),
            _ms(one.detected, one.first_step),
            str(one.steps_lost),
            sources_in_words(one.sources) or "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Times are counted from the moment of detection.", ""]
    lines += [f"{one.number}. {capital(one.reason)}." for one in found if one.reason]
    return "\n".join(lines)


def _failure(fault: Fault) -> str:
    after = f", after step {fault.finished}" if fault.finished else ""
    text = f"## What failed first\n\n{capital(fault.message)}{after}."
    if not fault.traceback:
        return text
    return f"{text}\n\n```text\n{fault.traceback.rstrip()}\n```"


def _ms(since: float, until: float) -> str:
    value = milliseconds(since, until)
    return "-" if value is None else f"{value:.0f} ms"
