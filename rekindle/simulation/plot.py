"""Plot the answer: goodput, lost time, incidents, and the checkpoint interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rekindle.recovery.policy.policy import Strategy
from rekindle.simulation import estimate
from rekindle.simulation.estimate import Estimate, Scenario
from rekindle.simulation.outcome import Loss
from rekindle.simulation.report import duration

_POLICIES = ("#2e86ab", "#e07a3f")
_LOSSES = ("#d1495b", "#e07a3f", "#2e86ab", "#7d5ba6", "#8a7b00", "#4f9d69", "#555555")
_TICKS = [1, 10, 60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400, 60 * 86_400]  # seconds

Named = Sequence[tuple[str, Estimate]]


def draw(question: Scenario, named: Named, path: Path) -> None:
    """Draw one or two policies into a PNG file. Raises OSError: the file is not writable."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    world = question.world
    figure.suptitle(
        f"{world.nodes} nodes x {world.per_node} devices, faults as in {question.mix.name}, "
        f"{question.days:g} days, {question.runs} runs",
        fontsize=12,
    )
    (goodput, lost), (incidents, checkpoints) = figure.subplots(2, 2)
    _goodput(goodput, named)
    _lost(lost, named)
    _incidents(incidents, named)
    _checkpoints(checkpoints, named)
    figure.savefig(path, format="png", dpi=110)


def _goodput(axes: Axes, named: Named) -> None:
    """Draw a dot per run, lines between runs with the same faults, and the mean with interval."""
    runs = [[outcome.goodput for outcome in one.outcomes] for _, one in named]
    for pair in zip(*runs, strict=True):
        axes.plot(range(len(pair)), pair, color="#bbbbbb", linewidth=0.8, zorder=1)
    for place, (_, one) in enumerate(named):
        values = runs[place]
        axes.plot([place] * len(values), values, "o", color=_POLICIES[place], alpha=0.35)
        found = one.goodput
        error = [[found.mean - found.low], [found.high - found.mean]]
        axes.errorbar(place, found.mean, error, fmt="D", color="#333333", capsize=7, zorder=3)
        left = place < len(named) - 1  # the lines to the next policy are on the other side
        axes.annotate(
            f"{found.mean:.4f}",
            (place, found.mean),
            xytext=(-14 if left else 14, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
        )
    axes.set_xticks(range(len(named)), [name for name, _ in named])
    axes.set_xlim(-0.5, len(named) - 0.3)
    axes.set_ylabel("goodput")
    axes.set_title("Goodput: runs, mean and 95 % interval", fontsize=10)
    axes.grid(axis="y", alpha=0.25)


def _lost(axes: Axes, named: Named) -> None:
    """Draw the share of time that each cause takes, one bar per policy."""
    left = np.zeros(len(named))
    for loss, colour in zip(Loss, _LOSSES, strict=True):
        share = np.array([100 * one.lost(loss) for _, one in named])
        if share.any():
            axes.barh(range(len(named)), share, 0.5, left=left, color=colour, label=loss.value)
            left += share
    axes.set_yticks(range(len(named)), [name for name, _ in named])
    axes.set_ylim(len(named) - 0.4, -0.6)
    axes.set_xlabel("% of the time")
    axes.set_title("Time that makes no progress", fontsize=10)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)


def _incidents(axes: Axes, named: Named) -> None:
    """Draw the number of incidents for each strategy."""
    found = [one.incidents for _, one in named]
    strategies = [strategy for strategy in Strategy if any(strategy in many for many in found)]
    height = 0.8 / len(named)
    for place, ((name, _), many) in enumerate(zip(named, found, strict=True)):
        at = [row + (place - (len(named) - 1) / 2) * height for row in range(len(strategies))]
        bars = [many.get(strategy, 0.0) for strategy in strategies]
        drawn = axes.barh(at, bars, height, color=_POLICIES[place], label=name)
        axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize=8)
    axes.set_yticks(range(len(strategies)), [strategy.value for strategy in strategies])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("incidents per run")
    axes.set_title("Incidents by the strongest strategy that they used", fontsize=10)
    axes.grid(axis="x", alpha=0.25)
    if len(named) > 1:
        axes.legend(fontsize=8, loc="lower right")


def _checkpoints(axes: Axes, named: Named) -> None:
    """Draw the cost of checkpoints and of the work lost since the last one, by interval."""
    axes.set_title("Cost of checkpoints and of work lost since the last one", fontsize=10)
    if named[0][1].stall_s == 0:
        axes.text(0.5, 0.5, "here a checkpoint takes no time", ha="center", va="center")
        axes.set_axis_off()
        return
    for (name, one), colour in zip(named, _POLICIES, strict=False):
        rate, stall, best = one.store_rate, one.stall_s, one.best_interval
        intervals = np.geomspace(best / 20, best * 20, 200)
        axes.plot(intervals, [_cost(rate, at, stall) for at in intervals], color=colour, label=name)
        marks = (
            ("D", best, "exact", 5, colour),
            ("^", estimate.young(rate, stall), "Young", 10, "none"),
            ("v", estimate.daly(rate, stall), "Daly", 10, "none"),
        )
        for marker, at, by, size, face in marks:
            axes.plot(
                at,
                _cost(rate, at, stall),
                marker,
                color=colour,
                markersize=size,
                markerfacecolor=face,
                label=f"{by}: {duration(at)}",
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("checkpoint interval")
    axes.set_ylabel("% of the time")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _cost(rate: float, interval: float, stall: float) -> float:
    return 100 * (1 - estimate.goodput(rate=rate, interval=interval, stall=stall, downtime=0.0))
