"""Break down the time of steps: averages for each rank, and a trace for Perfetto. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rekindle.profiling.markers import COMMUNICATION, Range, operation_of
from rekindle.profiling.reading import Task

_ROWS = {"default": 0, COMMUNICATION: 1}
_PARTS = ("seconds", "compute", "forward", "loading", "waiting")
HEADS = ("rank", *(f"{part} (ms)" for part in ("step", *_PARTS[1:], "saving")))
WHAT = (
    "The table shows medians of the steps, and for saving the mean. Compute is a rank's own "
    "work without the wait for data. Waiting is the time in collectives."
)


def chrome_trace(by_rank: Mapping[int, Sequence[Range]], *, per_node: int = 1) -> bytes:
    """Return JSON of the Trace Event Format: times in microseconds, one process per rank."""
    events: list[dict[str, object]] = []
    for rank, spans in by_rank.items():
        name = f"rank {rank} (node {rank // per_node})"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events += [_event(rank, each) for each in spans]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(rank: int, span: Range) -> dict[str, object]:
    operation = operation_of(span.name) if span.domain == COMMUNICATION else None
    return {
        "ph": "X",
        "name": operation.op_name if operation else span.name,
        "cat": span.domain,
        "pid": rank,
        "tid": _ROWS.get(span.domain, 0),
        "ts": span.start / 1e3,
        "dur": (span.end - span.start) / 1e3,
        "args": msgspec.to_builtins(operation) if operation else {},
    }


def breakdown(task: Task, window: Iterable[int]) -> list[Sequence[object]]:
    """Return a row in milliseconds for each rank that has some of these steps; columns as HEADS."""
    steps = list(window)
    rows: list[Sequence[object]] = []
    for rank in task.ranks:
        own = [task.steps[step][rank] for step in steps if rank in task.steps[step]]
        if own:
            figures = [statistics.median(getattr(t, part) for t in own) for part in _PARTS]
            saving = statistics.fmean(times.saving for times in own)
            rows.append((rank, *(f"{each * 1e3:.3g}" for each in (*figures, saving))))
    return rows
