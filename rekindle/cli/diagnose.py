"""Implement `rekindle diagnose`: find slow ranks in the records of a job or of a folder."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.cli.terminal_output import clock, table
from rekindle.console import say
from rekindle.errors import UsageError
from rekindle.job.journal_reader import events_in, is_over
from rekindle.job.spec import JobDirectory, job_directory
from rekindle.profiling.findings import Finding, in_words, nodes_of
from rekindle.profiling.reading import (
    HEADS,
    WHAT,
    Task,
    breakdown,
    chrome_trace,
    diagnose,
    ranges_of,
    read_task,
    remarks,
    slower_forward,
    steps_with_collectives,
    stuck_in,
)
from rekindle.profiling.switch import limits_in
from rekindle.recovery.faults.stragglers import StragglerEvent
from rekindle.reporting.summary import precision


def run(options: argparse.Namespace) -> None:
    """Print the times of ranks and the slow ranks; write a trace and a picture on request."""
    folder, per_node = _where(options.job, options.per_node)
    task = read_task(folder)
    window = _window(task, options.steps)
    if options.trace is not None:
        began = min(times.start for times in task.steps[window[0]].values())
        last = task.steps[window[-1]].values()
        end = max(times.start + int(times.seconds * 1e9) for times in last)
        found = ranges_of(task.folder, began, end)
        _write(options.trace, lambda path: path.write_bytes(chrome_trace(found, per_node=per_node)))
    if options.picture is not None:
        from rekindle.reporting.heat_map import draw

        _write(options.picture, lambda path: draw(task, window, path))
    findings, now = diagnose(task, per_node=per_node)
    if options.json:
        print(json.dumps(_plain(task, findings, now, per_node=per_node)))
        return
    print(f"{task.folder}: {len(task.ranks)} ranks, steps {min(task.steps)} to {max(task.steps)}")
    table(HEADS, breakdown(task, window))
    print(WHAT)
    if not findings and steps_with_collectives(task):
        print("no rank is slow")
    for each in findings:
        lasts = any((each.kind, each.ranks) == (one.kind, one.ranks) for one in now)
        over = "" if lasts else " (it is over)"
        print(f"{each.kind.value}: {in_words(each, nodes_of(each, per_node))}{over}")
    for remark in remarks(task, per_node=per_node):
        print(remark)
    _print_stuck(task, _job(options.job))
    if any(each.may_be_sick for each in now):
        print("a node check can show whether a machine is the cause: rekindle run --network-check")
    _print_journal(options.job)


def _plain(
    task: Task, found: list[Finding], now: list[Finding], *, per_node: int
) -> dict[str, object]:
    """Return all results. with_collectives: the number of steps with records of collectives."""
    forward = slower_forward(task, per_node=per_node) if not steps_with_collectives(task) else None
    return {
        "found": msgspec.to_builtins(found),
        "now": msgspec.to_builtins(now),
        "steps": len(task.steps),
        "with_collectives": steps_with_collectives(task),
        "slower_forward": msgspec.to_builtins(forward or []),
    }


def _print_stuck(task: Task, directory: JobDirectory | None) -> None:
    """Print the ranks that wait for others. An ended job has none, because its ranks were ended."""
    if directory is not None and is_over(directory.journal_file):
        return
    environment = directory.spec().environment if directory is not None else {}
    flush_s = limits_in(os.environ | environment, say).flush_s
    for stuck in stuck_in(task.folder, time.time_ns(), flush_s):
        print(f"stuck: {stuck}")


def _write(where: str, write: Callable[[Path], object]) -> None:
    """Write a file. Raises UsageError: the path or the format of the picture is invalid."""
    try:
        write(Path(where))
    except (OSError, ValueError) as error:  # also for an unknown format of a picture
        raise UsageError(f"cannot write {where}: {error}") from error


def _print_journal(text: str) -> None:
    """Print the job's own findings and actions during training, if `text` is a job's name."""
    directory = _job(text)
    if directory is None:
        return
    events = events_in(directory.journal_file)
    found = [event for event in events if isinstance(event, StragglerEvent)]
    if found:
        print("\nfindings during training:")
        for event in found:
            print(f"{clock(event.at)}  {event.in_words()}")
        print(precision(events).in_words())


def _job(text: str) -> JobDirectory | None:
    """Return the job of this name, if this machine has it."""
    directory = JobDirectory(job_directory(text)) if "/" not in text else None
    return directory if directory is not None and directory.journal_file.exists() else None


def _where(text: str, per_node: int | None) -> tuple[Path, int]:
    """Return the folder of records, and the number of ranks per node. Raises UsageError."""
    if per_node is not None and per_node < 1:
        raise UsageError(f"--per-node {per_node}: give at least 1")
    directory = _job(text)
    if directory is not None:
        ranks = directory.spec().processes_per_node
        return directory.path / names.PROFILING_DIRECTORY, per_node or ranks
    if not Path(text).is_dir():
        raise UsageError(f"{text!r} is neither a job on this machine nor a folder of records")
    return Path(text), per_node or 1


def _window(task: Task, asked: str) -> list[int]:
    """Return the selected steps. Raises UsageError: the option is invalid, or selects none."""
    if not asked:
        return list(task.steps)
    first, colon, last = asked.partition(":")
    if not (colon and all(each.isascii() and each.isdecimal() for each in (first, last))):
        raise UsageError(f"--steps {asked!r}: give FIRST:LAST, such as 100:200")
    found = [step for step in task.steps if int(first) <= step <= int(last)]
    if not found:
        there = f"{min(task.steps)}:{max(task.steps)}"
        raise UsageError(f"--steps {asked}: there are records of steps {there} only")
    return found
