"""What the parts of the timeline picture share: the run as it is drawn, colours, legends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from rekindle.recovery.journal.journal import AnyEvent, Ended, Incident, JobStarted, incidents
from rekindle.reporting.event_text import outcome
from rekindle.reporting.step_records import StepRecord

NODE_COLOURS = ("#2e86ab", "#e07a3f", "#4f9d69", "#7d5ba6", "#a23b72", "#8a7b00")
FAULT_COLOUR = "#d1495b"

Handle = Line2D | Patch


@dataclass(frozen=True, slots=True)
class Run:
    """All that is drawn; times are seconds since the epoch."""

    title: str
    history: Sequence[AnyEvent]
    records: Mapping[int, Sequence[StepRecord]]
    found: Sequence[Incident]
    per_node: int
    begin: float
    end: float


def run_of(history: Sequence[AnyEvent], records: Mapping[int, Sequence[StepRecord]]) -> Run:
    """Gather what is drawn of a job from its ledger and its step records."""
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
    """Return a colour for a number, again and again the same ones."""
    return colours[number % len(colours)]


def legend_below(axes: Axes, handles: Sequence[Handle], *, inches: float) -> None:
    """Put the legend so far below the axes, where it hides nothing."""
    figure = axes.get_figure()
    assert figure is not None
    offset = ScaledTranslation(0, -inches, figure.dpi_scale_trans)
    axes.legend(
        handles=handles,
        fontsize=8,
        ncols=len(handles),
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=axes.transAxes + offset,
        frameon=False,
    )
