"""Draw the compute time of each rank in each step."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from rekindle.profiling.reading import Task

_RANGE = (0.5, 2.0)  # ratios to the step's median; values outside have the colour of the nearer end


def draw(task: Task, window: list[int], path: Path) -> None:
    """Draw ranks over steps; the colour is the ratio of compute time to the step's median."""
    ranks = task.ranks
    values = np.full((len(ranks), len(window)), np.nan)
    for column, step in enumerate(window):
        times = task.steps[step]
        usual = statistics.median(each.compute for each in times.values()) or 1e-9
        for row, rank in enumerate(ranks):
            if rank in times:
                values[row, column] = times[rank].compute / usual
    height = min(12.0, 2.2 + 0.25 * len(ranks))
    figure, axes = plt.subplots(figsize=(10.0, height), layout="constrained")
    scale = mpl.colors.TwoSlopeNorm(vcenter=1.0, vmin=_RANGE[0], vmax=_RANGE[1])
    edges = np.arange(len(ranks) + 1) - 0.5
    steps = np.append(window, window[-1] + 1) - 0.5
    image = axes.pcolormesh(steps, edges, values, cmap="RdBu_r", norm=scale)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    axes.set_ylabel("rank")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("compute time of each rank, relative to the median of the step")
    figure.colorbar(image, ax=axes, extend="both", ticks=[0.5, 0.75, 1, 1.25, 1.5, 2])
    figure.savefig(path, dpi=120)
    plt.close(figure)
