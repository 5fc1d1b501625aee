"""A picture of a job: its steps over time, its ranks by generation, and each incident's parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rekindle.recovery.journal.journal import (
    AnyEvent,
    Checkpointed,
    CheckpointLeftOut,
    Ended,
    FirstStep,
    Incident,
)
from rekindle.reporting.step_records import StepRecord
from rekindle.reporting.timeline.rows import MOST_RANKS, draw_incidents, draw_ranks
from rekindle.reporting.timeline.run import (
    FAULT_COLOUR,
    NODE_COLOURS,
    Handle,
    Run,
    colour_of,
    legend_below,
    run_of,
)

_MOST_INCIDENTS = 12


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment to point out, e.g. when a fault was injected; `at` is seconds since the epoch."""

    at: float
    label: str


def draw(
    history: Sequence[AnyEvent],
    records: Mapping[int, Sequence[StepRecord]],
    path: Path,
    *,
    marks: Sequence[Mark] = (),
) -> None:
    """Draw the job of this ledger and these step records into a PNG file."""
    run = run_of(history, records)
    rows = min(len(run.records), MOST_RANKS)
    shown = run.found[-_MOST_INCIDENTS:]
    heights = [3.6, 0.32 * rows + 0.5, 0.42 * len(shown) + 0.5]
    kept = [height for height, there in zip(heights, (True, rows, shown), strict=True) if there]
    figure = Figure(figsize=(12, sum(kept) + 0.75 * len(kept)), layout="constrained")
    figure.suptitle(run.title, fontsize=11)
    axes = iter(figure.subplots(len(kept), 1, height_ratios=kept, squeeze=False)[:, 0])
    _draw_steps(next(axes), run, marks)
    if rows:
        draw_ranks(next(axes), run)
    if shown:
        draw_incidents(next(axes), shown)
    figure.savefig(path, dpi=110)


def _draw_steps(axes: Axes, run: Run, marks: Sequence[Mark]) -> None:
    """Draw steps over time, one line per rank in its node's colour, and what disturbed them."""
    if run.records:
        for rank, many in run.records.items():
            node = rank // run.per_node
            # Ranks march in step: the lines of later nodes are thinner, or they would hide others.
            width = max(1.0, 3.5 - 1.5 * node)
            times, steps = _curve(many, run)
            axes.plot(times, steps, color=colour_of(NODE_COLOURS, node), linewidth=width)
    else:
        reached = [(e.at - run.begin, _step(e)) for e in run.history]
        known = [(at, step) for at, step in reached if step is not None]
        axes.plot([at for at, _ in known], [step for _, step in known], color=NODE_COLOURS[0])
    for event in run.history:
        if isinstance(event, Checkpointed):
            axes.plot(event.at - run.begin, event.step, "D", color="#555555", markersize=4)
        elif isinstance(event, CheckpointLeftOut):
            axes.plot(event.at - run.begin, event.step, "x", color="#555555", markersize=5)
    for incident in run.found:
        _draw_span(axes, incident, run)
    for mark in marks:
        _draw_mark(axes, mark, run)
    axes.set_xlim(0, max(run.end - run.begin, 0.001))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the job began")
    axes.set_ylabel("steps finished")
    axes.grid(alpha=0.25)
    legend_below(axes, _steps_legend(run), inches=0.45)


def _curve(many: Sequence[StepRecord], run: Run) -> tuple[list[float], list[float]]:
    """Return a rank's steps over time, with a gap where a generation ends."""
    times: list[float] = []
    steps: list[float] = []
    for before, record in zip((None, *many), many, strict=False):
        if before is not None and before.generation != record.generation:
            times.append(record.at - run.begin)
            steps.append(math.nan)
        times.append(record.at - run.begin)
        steps.append(record.step + 1)
    return times, steps


def _step(event: AnyEvent) -> int | None:
    if isinstance(event, FirstStep | Checkpointed):
        return event.step
    return event.finished if isinstance(event, Ended) else None


def _draw_mark(axes: Axes, mark: Mark, run: Run) -> None:
    """Draw a moment with its label on the side where the curve is not."""
    at = mark.at - run.begin
    late = mark.at > (run.begin + run.end) / 2
    axes.axvline(at, color="#333333", linewidth=0.9, linestyle=":")
    axes.text(
        at,
        0.03 if late else 0.97,
        f"{mark.label} ",
        rotation=90,
        fontsize=8,
        ha="right",
        va="bottom" if late else "top",
        transform=axes.get_xaxis_transform(),
    )


def _draw_span(axes: Axes, incident: Incident, run: Run) -> None:
    since = incident.detected - run.begin
    until = (incident.first_step or run.end) - run.begin
    axes.axvspan(since, until, color=FAULT_COLOUR, alpha=0.25, linewidth=0)
    axes.axvline(since, color=FAULT_COLOUR, linewidth=1.0)
    axes.text(
        since,
        1.01,
        f"#{incident.number}",
        fontsize=8,
        ha="center",
        va="bottom",
        color=FAULT_COLOUR,
        transform=axes.get_xaxis_transform(),
    )


def _steps_legend(run: Run) -> list[Handle]:
    handles: list[Handle] = []
    nodes = sorted({rank // run.per_node for rank in run.records})
    for node in nodes[: len(NODE_COLOURS)]:
        ranks = [str(rank) for rank in run.records if rank // run.per_node == node]
        label = f"node {node}: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        handles.append(Line2D([], [], color=colour_of(NODE_COLOURS, node), label=label))
    if run.found:
        handles.append(Patch(color=FAULT_COLOUR, alpha=0.4, label="incident"))
    if any(isinstance(event, Checkpointed) for event in run.history):
        marker = Line2D([], [], color="#555555", marker="D", linestyle="", label="checkpoint")
        handles.append(marker)
    if any(isinstance(event, CheckpointLeftOut) for event in run.history):
        marker = Line2D([], [], color="#555555", marker="x", linestyle="", label="left out")
        handles.append(marker)
    return handles
