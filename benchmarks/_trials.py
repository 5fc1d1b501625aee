"""Cause faults in turn, and measure each until every rank has completed a step again."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import RANKS, load, summary
from _faults import Struck
from _jobs import Job, Line

STEPS = 10_000_000  # more than any of these jobs does
SETTLE_STEPS = 10  # by all ranks between two faults
NOT_BACK_S = 60.0
START_S = 120.0

Parts = dict[str, float]


@dataclass(frozen=True)
class Trial:
    """One fault: its rank and time, and the time when every rank had completed a step again."""

    rank: int
    at: float
    back: float


class Runner:
    """A job that runs for the complete measurement.

    settle: the steps that it does before the other job's first turn.
    """

    def __init__(self, name: str, start: Callable[[Path], Job], settle: int = SETTLE_STEPS) -> None:
        self.name = name
        self._start = start
        self._settle = settle
        self._job: Job | None = None
        self._jobs = 0

    def running(self, folder: Path) -> Job:
        """Return the job, started again if it did not recover from the last fault."""
        if self._job is None:
            self._jobs += 1
            self._job = self._start(folder / f"{self.name}{self._jobs}")
            if not self._job.wait_steps(self._settle, limit_s=START_S):
                raise SystemExit(f"{self.name} did not train:\n{self._job.output()}")
            self._job.slow()
        return self._job

    def end(self) -> None:
        """End the job, if there is one."""
        if self._job is not None:
            self._job.end()
            self._job = None


@dataclass
class Side:
    """One fault of one job, over all its trials; a job may have several sides."""

    name: str
    runner: Runner
    strike: Callable[[Job, int], Struck]
    explain: Callable[[Job, Trial], Parts]
    totals: list[float] = field(default_factory=list)
    parts: list[Parts] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    not_back: int = 0
    extra_restarts: int = 0
    pids_changed: int = 0

    def trial(self, folder: Path, number: int) -> None:
        """Cause the fault and wait until all ranks have recovered; `number` selects the victim."""
        job = self.runner.running(folder)
        job.full_speed()
        calm = time.time()
        if not job.wait_steps(SETTLE_STEPS):
            raise SystemExit(f"{self.runner.name} stopped training:\n{job.output()}")
        self.steps += step_times(job, calm)
        time.sleep(random.uniform(0.0, 0.05))  # at a random point of a step
        pids = [job.pid(rank) for rank in range(RANKS)]
        before = job.incarnation
        struck = self.strike(job, number)
        found = job.wait_all("step", incarnation=before + 1, since=struck.at, limit_s=NOT_BACK_S)
        if found is None:
            self.not_back += 1
            self.runner.end()
            print(f"  {self.name}: {struck.what}, not back within {NOT_BACK_S:.0f} s")
            return
        trial = Trial(struck.rank, struck.at, max(line.at for line in found.values()))
        self.totals.append((trial.back - trial.at) * 1000)
        own = [x for x in job.lines if x.event == "step" and x.incarnation == before]
        newest = max(line.number for line in own if line.at <= struck.at)
        self.lost.append(max(0, newest + 1 - min(line.number for line in found.values())))
        self.extra_restarts += job.incarnation - before - 1
        healthy = set(range(RANKS)) - struck.killed
        self.pids_changed += sum(job.pid(rank) != pids[rank] for rank in healthy)
        self.loads.append(load())
        time.sleep(0.1)  # until the launcher has written its own record
        self.parts.append(self.explain(job, trial))
        job.slow()
        print(f"  {self.name}: {struck.what}, back after {self.totals[-1]:,.0f} ms", flush=True)

    def by_part(self) -> dict[str, dict[str, float | int]]:
        """Return a summary of each recovery stage, over all trials."""
        names = dict.fromkeys(name for parts in self.parts for name in parts)
        return {name: summary([p[name] for p in self.parts if name in p]) for name in names}

    def counts(self) -> dict[str, Any]:
        """Return the counts, in addition to the times."""
        return {
            "not_back": self.not_back,
            "steps_repeated_max": max(self.lost, default=0),
            "step_ms": round(statistics.median(self.steps), 1),
            "load_median": round(statistics.median(self.loads), 2) if self.loads else None,
        }


def step_times(job: Job, since: float, until: float = math.inf) -> list[float]:
    """Return the milliseconds between the steps of rank 0 in a period."""
    steps = (x.at for x in job.lines if x.rank == 0 and x.event == "step")
    ends = [at for at in steps if since <= at <= until]
    return [(b - a) * 1000 for a, b in itertools.pairwise(ends)]


def stages(trial: Trial, ends: dict[str, float]) -> Parts:
    """Return the milliseconds of each stage after the stage before it."""
    parts, last = {}, trial.at
    for name, end in ends.items():
        parts[name] = (end - last) * 1000
        last = end
    return parts


def parts_of_torchrun(job: Job, trial: Trial) -> Parts:
    """Return the milliseconds of each stage, from the ranks' lines in the last incarnation."""
    since = [line for line in job.lines if line.at > trial.at]
    pids = {line.rank: line.pid for line in since if line.event == "up"}
    new = [line for line in since if pids.get(line.rank) == line.pid]
    return stages(
        trial,
        {
            "all ended and started again": _last(new, "up"),
            "imports, model, checkpoint read": _last(new, "ready"),
            "group formed, first step of all": trial.back,
        },
    )


def parts_of_torchft(job: Job, trial: Trial) -> Parts:
    """Return the milliseconds until the others have done a step, and until the lost one did."""
    steps = [x for x in job.lines if x.event == "step" and x.at > trial.at]
    before = max(x.incarnation for x in job.lines if x.event == "step" and x.at <= trial.at)
    others: dict[int, float] = {}
    for line in steps:
        if line.rank != trial.rank and line.incarnation > before:
            others.setdefault(line.rank, line.at)
    return stages(trial, {"the others go on": max(others.values()), "it is back": trial.back})


def _last(lines: list[Line], event: str) -> float:
    return max(line.at for line in lines if line.event == event)
