"""How long a training run stands still when one of its 4 ranks is killed: Rekindle and torchrun.

Both jobs train the same small GPT and stay up for the whole measurement. In turn, one of them is
let off the leash (the other does one step a second meanwhile), a rank of it gets SIGKILL at some
moment of a step, and the time runs until every rank has completed a step in the new incarnation:
after the regroup with Rekindle, after the restart with torchrun. torchrun's ranks resume from a
checkpoint that rank 0 writes every 10 steps; that it repeats up to 10 steps is not counted against
it. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _jobs
import psutil
from _common import (
    HERE,
    RANKS,
    Conditions,
    finish,
    load,
    need_torch,
    options,
    place,
    ratio,
    show_summaries,
    summary,
)
from _jobs import Job

STEPS = 10_000_000  # more than it ever does
EVERY = 10  # steps between torchrun's checkpoints, and between Rekindle's snapshots
SETTLE_STEPS = 10  # by all ranks between two kills
NOT_BACK_S = 60.0
QUICK_S = 40.0

Parts = dict[str, float]


@dataclass
class Side:
    """One of the two, over all its trials."""

    name: str
    start: Callable[[Path], Job]
    explain: Callable[[Job, Kill], Parts]
    job: Job | None = None
    jobs: int = 0
    totals: list[float] = field(default_factory=list)
    parts: list[Parts] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    not_back: int = 0
    extra_restarts: int = 0
    pids_changed: int = 0

    def running(self, folder: Path) -> Job:
        """The job; started again if it did not come back from the last kill."""
        if self.job is None:
            self.jobs += 1
            self.job = self.start(folder / f"{self.name}{self.jobs}")
            if not self.job.wait_steps(SETTLE_STEPS, limit_s=120.0):
                raise SystemExit(f"{self.name} did not train:\n{self.job.output()}")
            self.job.slow()
        return self.job

    def end(self) -> None:
        """End the job, if there is one."""
        if self.job is not None:
            self.job.end()
            self.job = None


@dataclass(frozen=True)
class Kill:
    """One trial: who was killed when, and when every rank had completed a step again."""

    rank: int
    at: float
    before: int  # the incarnation that the kill ended
    after: int
    back: float


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, help="kills of each (default: 15, quick: 4)")
    parser.add_argument("--size", default="tiny", help="of the model, as in examples/charlm")
    args = parser.parse_args()
    need_torch()
    trials = args.trials or (4 if args.quick else 15)
    conditions = Conditions()
    sides = _sides(args.size)
    began = time.monotonic()
    with place() as folder:
        try:
            for trial in range(trials):
                for side in sides:
                    _trial(side, side.running(folder), trial % RANKS)
                if args.quick and time.monotonic() - began > QUICK_S:
                    break
        finally:
            for side in sides:
                side.end()
        forming = _forming(3 if args.quick else 15)
    result = _result(*sides, forming)
    _show(*sides, result)
    finish(result, conditions, args.json)


def _sides(size: str) -> tuple[Side, Side]:
    def start_rekindle(folder: Path) -> Job:
        extra = ["--snapshot-every", str(EVERY)]
        return _jobs.rekindle(folder, "_rank_session.py", [size, STEPS], extra)

    def start_torchrun(folder: Path) -> Job:
        extra = ["--max-restarts", "1000"]
        return _jobs.torchrun(folder, "_rank_plain.py", [size, STEPS, EVERY], extra)

    return (
        Side("rekindle", start_rekindle, _parts_of_rekindle),
        Side("torchrun", start_torchrun, _parts_of_torchrun),
    )


# ---- one trial


def _trial(side: Side, job: Job, rank: int) -> None:
    """Kill one rank of the job and wait until all are back."""
    job.full_speed()
    if not job.wait_steps(SETTLE_STEPS):
        raise SystemExit(f"{side.name} stopped training:\n{job.output()}")
    side.steps += _step_times(job)
    time.sleep(random.uniform(0.0, 0.05))  # any moment of a step
    pids = [job.pid(other) for other in range(RANKS)]
    before, newest = job.incarnation, _newest_step(job)
    at = time.time()
    psutil.Process(pids[rank]).kill()
    found = job.wait_all("step", incarnation=before + 1, since=at, limit_s=NOT_BACK_S)
    if found is None:
        side.not_back += 1
        side.end()
        print(f"  {side.name}: rank {rank} killed, not back within {NOT_BACK_S:.0f} s")
        return
    kill = Kill(rank, at, before, job.incarnation, max(line.at for line in found.values()))
    side.totals.append((kill.back - at) * 1000)
    side.lost.append(max(0, newest + 1 - min(line.number for line in found.values())))
    side.extra_restarts += kill.after - before - 1
    side.pids_changed += sum(job.pid(r) != pids[r] for r in range(RANKS) if r != rank)
    side.loads.append(load())
    time.sleep(0.1)  # the launcher writes its own record of it
    side.parts.append(side.explain(job, kill))
    job.slow()
    print(f"  {side.name}: rank {rank} killed, back after {side.totals[-1]:,.0f} ms", flush=True)


def _newest_step(job: Job) -> int:
    job.poll()
    return max(line.number for line in job.lines if line.event == "step")


def _step_times(job: Job) -> list[float]:
    """Milliseconds between the last steps of rank 0."""
    ends = [line.at for line in job.lines if line.rank == 0 and line.event == "step"]
    ends = ends[-SETTLE_STEPS:]
    return [(b - a) * 1000 for a, b in itertools.pairwise(ends)]


# ---- where the time goes


def _parts_of_rekindle(job: Job, kill: Kill) -> Parts:
    """Milliseconds of each stage, from the job's ledger and the lines of its ranks."""
    ledger = next((job.folder / _jobs.HOME).glob("jobs/*/ledger.jsonl"))
    events = [json.loads(line) for line in ledger.read_text().splitlines()]
    seen = min(
        event["fault"]["at"]
        for event in events
        if event["type"] == "fault" and event["fault"].get("rank") == kill.rank
        and event["fault"]["kind"] == "process" and event["at"] >= kill.at
    )  # fmt: skip
    new = [line for line in job.lines if line.rank == kill.rank and line.at > kill.at]
    left = [x.at for x in job.lines if x.event == "left" and x.at > kill.at]

    def journal(kind: str) -> float:
        return float(next(e["at"] for e in events if e["type"] == kind and e["at"] > kill.at))

    parts = _stages(
        kill,
        {
            "kernel: exit seen by the agent": seen,
            "fork: first line of the script": _first(new, "up"),
            "script: until its Session": _first(new, "ready"),
            "all arrived, generation planned": journal("formed"),
            "group formed, state copied": journal("restored"),
            "first step of all ranks": kill.back,
        },
    )
    if left:
        parts["(survivors out of the step, from the kill)"] = (max(left) - kill.at) * 1000
    return parts


def _parts_of_torchrun(job: Job, kill: Kill) -> Parts:
    """Milliseconds of each stage, from the lines of the ranks in the last incarnation."""
    since = [line for line in job.lines if line.at > kill.at]
    last = {line.rank: line.pid for line in since if line.event == "up"}
    new = [line for line in since if last.get(line.rank) == line.pid]
    return _stages(
        kill,
        {
            "all ended and started again": _last(new, "up"),
            "imports, model, checkpoint read": _last(new, "ready"),
            "group formed, first step of all": kill.back,
        },
    )


def _stages(kill: Kill, ends: dict[str, float]) -> Parts:
    """The milliseconds that each stage took beyond the one before it."""
    parts, last = {}, kill.at
    for name, end in ends.items():
        parts[name] = (end - last) * 1000
        last = end
    return parts


def _first(lines: list[_jobs.Line], event: str) -> float:
    return min(line.at for line in lines if line.event == event)


def _last(lines: list[_jobs.Line], event: str) -> float:
    return max(line.at for line in lines if line.event == event)


def _forming(times: int) -> list[float]:
    """Milliseconds for 4 gloo ranks on this machine to form a group, by itself."""
    command = [sys.executable, str(HERE / "_forming.py"), str(RANKS), str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [float(text) for text in done.stdout.split()]


# ---- what comes out


def _by_part(side: Side) -> dict[str, dict[str, float | int]]:
    names = dict.fromkeys(name for parts in side.parts for name in parts)
    return {name: summary([p[name] for p in side.parts if name in p]) for name in names}


def _floor(rekindle: Side, forming: list[float]) -> dict[str, float]:
    """What cannot be had for less when a process is replaced: the least of each stage here."""
    kernel, fork, script = list(_by_part(rekindle).values())[:3]
    parts = {
        "kernel ends the process": float(kernel["min_ms"]),
        "fork": float(fork["min_ms"]),
        "the script's own start": float(script["min_ms"]),
        "4 gloo ranks form a group": min(forming),
        "one step": statistics.median(rekindle.steps),
    }
    return {name: round(value, 1) for name, value in parts.items()}


def _result(rekindle: Side, torchrun: Side, forming: list[float]) -> dict[str, Any]:
    floor = _floor(rekindle, forming)
    ours, theirs = summary(rekindle.totals), summary(torchrun.totals)
    return {
        "rekindle": {
            **ours,
            **_counts(rekindle),
            "healthy_processes_replaced": rekindle.pids_changed,
        },
        "torchrun": {
            **theirs,
            **_counts(torchrun),
            "extra_restarts": torchrun.extra_restarts,
        },
        "ratio": ratio(theirs, ours),
        "parts": {side.name: _by_part(side) for side in (rekindle, torchrun)},
        "floor": {"total_ms": round(sum(floor.values()), 1), "parts_ms": floor},
        "forming": summary(forming),
    }


def _counts(side: Side) -> dict[str, Any]:
    return {
        "not_back": side.not_back,
        "steps_repeated_max": max(side.lost, default=0),
        "step_ms": round(statistics.median(side.steps), 1),
        "load_median": round(statistics.median(side.loads), 2) if side.loads else None,
    }


def _show(rekindle: Side, torchrun: Side, result: dict[str, Any]) -> None:
    rows = {name: result[name] for name in ("rekindle", "torchrun")}
    show_summaries("kill -9 of 1 of 4 ranks -> a step of all ranks, ms", rows)
    print(f"ratio of medians: {result['ratio']}")
    for side in (rekindle, torchrun):
        counts = result[side.name]
        print(
            f"{side.name}: {counts['not_back']} of {side.not_back + len(side.totals)} trials not "
            f"back, at most {counts['steps_repeated_max']} finished steps done again, a step "
            f"takes {counts['step_ms']} ms otherwise"
        )
    print(
        f"rekindle: {rekindle.pids_changed} healthy processes replaced; "
        f"torchrun: all of them, and {torchrun.extra_restarts} restarts more than kills"
    )
    for side in (rekindle, torchrun):
        show_summaries(f"where {side.name}'s time goes, ms", _by_part(side))
    floor = result["floor"]
    print("\nfloor of replacing a process (the least of each stage here, and a usual step):")
    print(" + ".join(f"{name} {ms}" for name, ms in floor["parts_ms"].items()), end=" ")
    print(f"= {floor['total_ms']} ms")


if __name__ == "__main__":
    main()
