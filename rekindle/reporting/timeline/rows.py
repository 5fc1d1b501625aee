"""The lower parts of the timeline picture: a row per rank, and a row per incident."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rekindle.recovery.journal.journal import Incident, RanksStarted
from rekindle.reporting.timeline.run import FAULT_COLOUR, Handle, Run, colour_of, legend_below

PARTS = ("detect", "decide", "regroup", "restore", "first step")
_PART_COLOURS = ("#b0b0b0", "#e6a817", "#d1495b", "#2e86ab", "#4f9d69")
_GENERATION_COLOURS = ("#9ecae1", "#3182bd", "#a1d99b", "#31a354", "#bcbddc", "#756bb1")
MOST_RANKS = 32


def draw_ranks(axes: Axes, run: Run) -> None:
    """Draw a row per rank: when it did steps, in the colour of the generation it did them in."""
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
    axes.tick_params(labelsize=8)
    handles: list[Handle] = [
        Patch(color=colour_of(_GENERATION_COLOURS, generation), label=f"generation {generation}")
        for generation in generations[-len(_GENERATION_COLOURS) :]
    ]
    handles.append(Line2D([], [], marker=">", color="black", linestyle="", label="rank started"))
    if run.found:
        broke = Line2D([], [], marker="x", color=FAULT_COLOUR, linestyle="", label="broke")
        handles.append(broke)
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
        lost = f"{incident.steps_lost} steps lost"
        axes.text(left, row, f"  {state}, {lost}", va="center", fontsize=8)
    labels = [f"#{i.number} {i.cause.blamed()}\n{_strategy(i)}" for i in shown]
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds from the fault to the first good step of all ranks")
    axes.tick_params(labelsize=8)
    handles: list[Handle] = [
        Patch(color=c, label=p) for p, c in zip(PARTS, _PART_COLOURS, strict=True)
    ]
    legend_below(axes, handles, inches=0.45)


def _strategy(incident: Incident) -> str:
    return incident.strategy.value if incident.strategy else "nothing done"


def parts_of(incident: Incident) -> dict[str, float]:
    """Return the milliseconds of each part of an incident, of those that took place."""
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
