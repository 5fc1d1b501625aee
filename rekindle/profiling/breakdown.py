"""Where each rank's time goes in a step, on average. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rekindle.profiling.reading import Task

_PARTS = ("seconds", "compute", "forward", "loading", "waiting")
HEADS = ("rank", *(f"{part} (ms)" for part in ("step", *_PARTS[1:], "saving")))
WHAT = (
    "medians of the steps, of saving the mean; compute: own work without waiting for data; "
    "waiting: in collectives"
)


def breakdown(task: Task, window: Iterable[int]) -> list[Sequence[object]]:
    """Return a row of milliseconds for each rank that has done some of these steps, as HEADS."""
    steps = list(window)
    rows: list[Sequence[object]] = []
    for rank in task.ranks:
        own = [task.steps[step][rank] for step in steps if rank in task.steps[step]]
        if own:
            figures = [statistics.median(getattr(t, part) for t in own) for part in _PARTS]
            saving = statistics.fmean(times.saving for times in own)
            rows.append((rank, *(f"{each * 1e3:.3g}" for each in (*figures, saving))))
    return rows
