"""Draw the timeline picture of a run: steps, rows of ranks and incidents, legends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from rekindle.recovery.journal.journal import (
    AnyEvent,
    Checkpointed,
    CheckpointLeftOut,
    Ended,
    FirstStep,
    Incident,
    JobStarted,
    RanksStarted,
    incidents,
)
from rekindle.reporting.event_text import outcome
from rekindle.reporting.step_records import StepRecord

NODE_COLOURS = ("#2e86ab", "#e07a3f", "#4f9d69", "#7d5ba6", "#a23b72", "#8a7b00")
FAULT_COLOUR = "#d1495b"

Handle = Line2D | Patch
PARTS = ("detect", "decide", "regroup", "restore", "first step")
_PART_COLOURS = ("#b0b0b0", "#e6a817", "#d1495b", "#2e86ab", "#4f9d69")
_GENERATION_COLOURS = ("#9ecae1", "#3182bd", "#a1d99b", "#31a354", "#bcbddc", "#756bb1")
MOST_RANKS = 32
_MOST_INCIDENTS = 12
_WIDTH = 8.0  # inches; Prefect shows the picture in about 600 pixels


@dataclass(frozen=True, slots=True)
class Run:
    """The content of the picture; times are seconds since the epoch."""

    title: str
    history: Sequence[AnyEvent]
    records: Mapping[int, Sequence[StepRecord]]
    found: Sequence[Incident]
    per_node: int
    begin: float
    end: float


def run_of(history: Sequence[AnyEvent], records: Mapping[int, Sequence[StepRecord]]) -> Run:
    """Collect the content of the picture from a job's journal and its step records."""
    started = next((event for event in history if isinstance(event, JobStarted)), None)
    moments = [event.at for event in history]
    moments += [record.at for many in records.values() for record in many]
    ended = next((event for event in reversed(history) if isinstance(event, Ended)), None)
    end = outcome(ended.outcome, ended.finished) if ended else "has not ended"
    return Run(
        title=f"Job {started.job_id} {end}" if started else "No job was started",
        history=history,
        records={rank: many for rank, many in sorted(records.items()) if many},
        found=incidents(history),
        per_node=started.processes_per_node if started else 1,
        begin=min(moments, default=0.0),
        end=max(moments, default=0.0),
    )


def colour_of(colours: Sequence[str], number: int) -> str:
    """Return the colour of a number; the colours repeat."""
    return colours[number % len(colours)]


def legend_below(axes: Axes, handles: Sequence[Handle], *, inches: float) -> None:
    """Put the legend this many inches below the axes, where it hides nothing."""
    figure = axes.get_figure()
    assert figure is not None
    offset = ScaledTranslation(0, -inches, figure.dpi_scale_trans)
    axes.legend(
        handles=handles,
        fontsize=9,
        ncols=min(len(handles), 5),
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=axes.transAxes + offset,
        frameon=False,
    )


def draw_ranks(axes: Axes, run: Run) -> None:
    """Draw a row per rank: the times of its steps, in the colour of their generation."""
    ranks = list(run.records)[:MOST_RANKS]
    generations = sorted({r.generation for many in run.records.values() for r in many})
    for row, rank in enumerate(ranks):
        for generation in generations:
            times = [r.at for r in run.records[rank] if r.generation == generation]
            if times:
                since = min(times) - run.begin
                axes.barh(
                    row,
                    max(times) - min(times),
                    left=since,
                    height=0.7,
                    color=colour_of(_GENERATION_COLOURS, generation),
                )
        starts = [e.at for e in run.history if isinstance(e, RanksStarted) and rank in e.ranks]
        axes.plot(
            [at - run.begin for at in starts], [row] * len(starts), ">", color="black", markersize=5
        )
    for incident in run.found:
        broken = [row for row, rank in enumerate(ranks) if _is_blamed(incident, rank, run)]
        axes.plot(
            [incident.detected - run.begin] * len(broken),
            broken,
            "x",
            color=FAULT_COLOUR,
            markersize=8,
            markeredgewidth=2,
        )
    axes.set_yticks(range(len(ranks)), [f"node {r // run.per_node} · rank {r}" for r in ranks])
    axes.invert_yaxis()
    axes.set_xlim(0, max(run.end - run.begin, 0.001))
    axes.tick_params(labelsize=9)
    handles: list[Handle] = [
        Patch(color=colour_of(_GENERATION_COLOURS, generation), label=f"generation {generation}")
        for generation in generations[-len(_GENERATION_COLOURS) :]
    ]
    handles.append(Line2D([], [], marker=">", color="black", linestyle="", label="rank started"))
    if run.found:
        fault = Line2D([], [], marker="x", color=FAULT_COLOUR, linestyle="", label="fault")
        handles.append(fault)
    legend_below(axes, handles, inches=0.28)


def _is_blamed(incident: Incident, rank: int, run: Run) -> bool:
    cause = incident.cause
    if cause.rank >= 0:
        return cause.rank == rank
    return cause.node >= 0 and rank // run.per_node == cause.node


def draw_incidents(axes: Axes, shown: Sequence[Incident]) -> None:
    """Draw each incident as a bar of its parts in milliseconds."""
    for row, incident in enumerate(shown):
        left = 0.0
        for part, width in parts_of(incident).items():
            colour = _PART_COLOURS[PARTS.index(part)]
            axes.barh(row, width, left=left, height=0.65, color=colour)
            left += width
        state = f"{left:.0f} ms" if incident.closed else f"{left:.0f} ms, not recovered"
        steps = incident.steps_lost
        lost = "steps lost unknown" if steps is None else f"{steps} steps lost"
        axes.text(left, row, f"  {state}, {lost}", va="center", fontsize=9)
    labels = [f"#{i.number} {i.cause.blamed()}\n{_strategy(i)}" for i in shown]
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds from the fault to the first good step of all ranks")
    axes.tick_params(labelsize=9)
    handles: list[Handle] = [
        Patch(color=c, label=p) for p, c in zip(PARTS, _PART_COLOURS, strict=True)
    ]
    legend_below(axes, handles, inches=0.45)


def _strategy(incident: Incident) -> str:
    return incident.strategy.value if incident.strategy else "no action"


def parts_of(incident: Incident) -> dict[str, float]:
    """Return the duration of each part of an incident that took place, in milliseconds."""
    moments = (
        incident.cause.at or incident.detected,
        incident.detected,
        incident.decided,
        incident.regrouped,
        incident.restored,
        incident.first_step,
    )
    parts: dict[str, float] = {}
    before = moments[0]
    for part, moment in zip(PARTS, moments[1:], strict=True):
        if moment:
            parts[part] = max(0.0, moment - before) * 1000
            before = max(before, moment)
    return parts


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment with a label, e.g. an injected fault; `at` is seconds since the epoch."""

    at: float
    label: str


def draw(
    history: Sequence[AnyEvent],
    records: Mapping[int, Sequence[StepRecord]],
    path: Path,
    *,
    marks: Sequence[Mark] = (),
) -> None:
    """Draw the job of this journal and these step records into a PNG file."""
    run = run_of(history, records)
    rows = min(len(run.records), MOST_RANKS)
    shown = run.found[-_MOST_INCIDENTS:]
    heights = [3.6, 0.32 * rows + 0.5, 0.42 * len(shown) + 0.5]
    kept = [height for height, there in zip(heights, (True, rows, shown), strict=True) if there]
    figure = Figure(figsize=(_WIDTH, sum(kept) + 0.95 * len(kept)), layout="constrained")
    figure.suptitle(run.title, fontsize=11)
    axes = iter(figure.subplots(len(kept), 1, height_ratios=kept, squeeze=False)[:, 0])
    _draw_steps(next(axes), run, marks)
    if rows:
        draw_ranks(next(axes), run)
    if shown:
        draw_incidents(next(axes), shown)
    figure.savefig(path, dpi=165)


def _draw_steps(axes: Axes, run: Run, marks: Sequence[Mark]) -> None:
    """Draw steps over time, one line per rank in its node's colour, checkpoints and incidents."""
    if run.records:
        for rank, many in run.records.items():
            node = rank // run.per_node
            # Ranks finish steps at the same time. So later nodes have thinner lines, which hide no
            # others.
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
        fontsize=9,
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
        fontsize=9,
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
