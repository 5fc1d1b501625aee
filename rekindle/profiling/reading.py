"""Read the records of a task, break down its time, and state what the records cannot show."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from rekindle.errors import UsageError
from rekindle.profiling.blocked_collectives import CollectivePosition, stuck
from rekindle.profiling.detector import Detector
from rekindle.profiling.files import lines_of, numbered, rank_folders
from rekindle.profiling.findings import Finding, Slow, forward_in_words, nodes_of
from rekindle.profiling.markers import (
    COMMUNICATION,
    UNREADABLE,
    Range,
    marks,
    operation_of,
    ranges,
)
from rekindle.profiling.steps import Steps, StepTimes

STILL = 3  # after this number of write intervals without a record, the task is stalled
LATE = 2  # records of this number of newest write intervals may be incomplete
_ROWS = {"default": 0, COMMUNICATION: 1}
_PARTS = ("seconds", "compute", "forward", "loading", "waiting")
HEADS = ("rank", *(f"{part} (ms)" for part in ("step", *_PARTS[1:], "saving")))
WHAT = (
    "The table shows medians of the steps, and for saving the mean. Compute is a rank's own "
    "work without the wait for data. Waiting is the time in collectives."
)


class Task(msgspec.Struct, frozen=True):
    """Hold the steps of the ranks of a task. For a repeated step, the last time counts."""

    folder: Path
    steps: dict[int, dict[int, StepTimes]]  # by number, then by rank

    @property
    def ranks(self) -> list[int]:
        """Return all ranks with records."""
        return sorted({rank for times in self.steps.values() for rank in times})


def task_in(folder: Path) -> Path:
    """Return the folder of a task: the given folder, or the newest task in it.

    Raises UsageError: there are no records.
    """
    found = sorted(folder.iterdir()) if folder.is_dir() else []  # a job makes it with the first
    if found and _newest(folder):
        return folder
    tasks = [each for each in found if each.is_dir() and _newest(each)]
    if not tasks:
        raise UsageError(
            f"{folder} does not contain records; switch profiling on (`rekindle profile JOB "
            "on`), or give the folder of a task, with one folder for each rank in it"
        )
    return max(tasks, key=_newest)


def _newest(task: Path) -> float:
    """Return when a rank of the task last wrote a record, or 0."""
    files = (file for folder in rank_folders(task).values() for file in numbered(folder))
    return max((file.stat().st_mtime for file in files), default=0.0)


def read_task(folder: Path) -> Task:
    """Read all steps of a task.

    Raises UsageError: there are no records, or no step has ended.
    """
    task = task_in(folder)
    steps: dict[int, dict[int, StepTimes]] = defaultdict(dict)
    for rank, path in rank_folders(task).items():
        for times in Steps().read(ranges(lines_of(path))):
            steps[times.step][rank] = times
    if not steps:
        raise UsageError(f"{task}: no step has ended in these records")
    return Task(task, dict(sorted(steps.items())))


def ranges_of(task: Path, first_ns: int, end_ns: int) -> dict[int, list[Range]]:
    """Return the ranges of each rank that start and end between two times."""
    return {
        rank: [r for r in ranges(lines_of(path)) if first_ns <= r.start and r.end <= end_ns]
        for rank, path in sorted(rank_folders(task).items())
    }


def stuck_in(task: Path, now_ns: int, flush_s: float) -> list[str]:
    """Return the collectives that some ranks have not joined, if the task is stalled.

    `flush_s` is the interval at which ranks write, at different times. A task with newer records
    may not be stalled. A killed rank loses its unwritten records, so it may have joined.
    """
    positions = {}
    for rank, path in rank_folders(task).items():
        positions[rank] = CollectivePosition()
        positions[rank].read(marks(lines_of(path)))
    newest = max((each.at for each in positions.values()), default=0)
    if now_ns - newest <= STILL * flush_s * 1e9:
        return []
    found = []
    for each in stuck(positions):
        behind_ns = newest - max(positions[rank].at for rank in each.missing)
        unsure = (
            f", according to the records; if these ranks were killed, their last {flush_s:g} s "
            "are missing"
        )
        found.append(each.in_words() + unsure * (behind_ns < LATE * flush_s * 1e9))
    return found


class _Group(msgspec.Struct):
    """Describe a process group; TaskD writes it for each rank in iteration 5 of a run."""

    group_name: str
    global_ranks: list[int]


def peers_in(task: Path) -> list[list[int]]:
    """Return the data-parallel groups of a task, whose ranks do the same work; empty: unknown.

    Raises UsageError: a `parallel_group.json` is invalid.
    """
    groups: set[tuple[int, ...]] = set()
    for folder in rank_folders(task).values():
        path = folder / "parallel_group.json"
        try:
            found = msgspec.json.decode(path.read_bytes(), type=dict[str, _Group])
        except FileNotFoundError:
            continue
        except (OSError, *UNREADABLE) as error:
            raise UsageError(f"{path} is invalid: {error}; remove or correct it") from error
        groups |= {tuple(g.global_ranks) for g in found.values() if g.group_name == "dp"}
    ranks = [rank for group in groups for rank in group]
    return [list(group) for group in sorted(groups)] if len(ranks) == len(set(ranks)) else []


def diagnose(task: Task, *, per_node: int = 1) -> tuple[list[Finding], list[Finding]]:
    """Return all findings in order, and the findings that hold at the end.

    Raises UsageError: a `parallel_group.json` is invalid.
    """
    detector = Detector(peers_in(task.folder), per_node=per_node)
    findings = [found for step, times in task.steps.items() for found in detector.add(step, times)]
    return findings, detector.findings


def steps_with_collectives(task: Task) -> int:
    """Return the number of steps with records of collectives."""
    return sum(
        any(each.waiting or each.links for each in times.values()) for times in task.steps.values()
    )


def slower_forward(task: Task, *, per_node: int = 1) -> list[Finding] | None:
    """Return ranks whose forward pass has become longer than that of their peers.

    If each rank has the whole model, as in plain DDP, it does not wait for others in that pass. The
    result is None if the records do not include forward passes.
    """
    detector = Detector(per_node=per_node)
    known = False
    for step, times in task.steps.items():
        if all(each.forward for each in times.values()):
            known = True
            detector.add(step, {rank: _forward_alone(each) for rank, each in times.items()})
    found = detector.findings
    return [each for each in found if each.kind in (Slow.RANK, Slow.NODE)] if known else None


def _forward_alone(times: StepTimes) -> StepTimes:
    """Return the step as if everything except the forward pass were waiting."""
    rest = max(times.seconds - times.forward, 0.0)
    plain = {"loading": 0.0, "saving": 0.0, "links": ()}
    return msgspec.structs.replace(times, own=times.forward, waiting=rest, **plain)


def remarks(task: Task, *, per_node: int = 1) -> list[str]:
    """Return remarks on the limits of the records, and on forward passes; empty: no limits."""
    recorded, steps = steps_with_collectives(task), len(task.steps)
    if recorded == steps:
        return []
    if recorded:
        return [
            f"only {recorded} of {steps} steps have records of collectives; the time of the other "
            "steps does not show which rank is slow"
        ]
    lines = [
        "these records do not contain collectives; the time of a step does not show which rank "
        "is slow, because all ranks wait for the slowest"
    ]
    slower = slower_forward(task, per_node=per_node)
    if slower is not None and len(task.ranks) > 1:
        lines += [forward_in_words(each, nodes_of(each, per_node)) for each in slower] or [
            "no rank's forward pass has become longer than its peers'"
        ]
    return lines


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
