"""Records as a trace that Perfetto and Chrome open: one row of ranges for each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from rekindle.profiling.markers import COMMUNICATION, Range, operation_of

_ROWS = {"default": 0, COMMUNICATION: 1}


def chrome_trace(by_rank: Mapping[int, Sequence[Range]], *, per_node: int = 1) -> bytes:
    """Return JSON of the Trace Event Format: times in microseconds, a process for each rank."""
    events: list[dict[str, object]] = []
    for rank, made in by_rank.items():
        name = f"rank {rank} (node {rank // per_node})"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events += [_event(rank, each) for each in made]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(rank: int, made: Range) -> dict[str, object]:
    operation = operation_of(made.name) if made.domain == COMMUNICATION else None
    return {
        "ph": "X",
        "name": operation.op_name if operation else made.name,
        "cat": made.domain,
        "pid": rank,
        "tid": _ROWS.get(made.domain, 0),
        "ts": made.start / 1e3,
        "dur": (made.end - made.start) / 1e3,
        "args": msgspec.to_builtins(operation) if operation else {},
    }
