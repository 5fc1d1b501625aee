"""Measure how long training stops when one of its 4 ranks is killed: Rekindle and torchrun.

Both jobs train the same small GPT and run for the complete measurement. In turn, one of them runs
at full speed, while the other does one step per second. A rank of the fast job gets SIGKILL at a
random point of a step. The time ends when every rank has completed a step in the new incarnation:
after the regroup with Rekindle, after the restart with torchrun. torchrun's ranks resume from a
checkpoint that rank 0 writes every 10 steps. The up to 10 steps that torchrun repeats do not count
against it. torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import _faults
import _jobs
from _common import (
    RANKS,
    Conditions,
    finish,
    milliseconds_of,
    need_torch,
    options,
    place,
    ratio,
    show_summaries,
    summary,
)
from _jobs import Job
from _trials import STEPS, Parts, Runner, Side, Trial, parts_of_torchrun, stages

EVERY = 10  # steps between torchrun's checkpoints, and between Rekindle's snapshots
QUICK_S = 40.0


def main() -> None:
    """Measure, print and write the figures."""
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
                    side.trial(folder, trial)
                if args.quick and time.monotonic() - began > QUICK_S:
                    break
        finally:
            for side in sides:
                side.runner.end()
        forming = milliseconds_of("_forming.py", RANKS, 3 if args.quick else 15)
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
        Side("rekindle", Runner("rekindle", start_rekindle), _kill, _parts_of_rekindle),
        Side("torchrun", Runner("torchrun", start_torchrun), _kill, parts_of_torchrun),
    )


def _kill(job: Job, trial: int) -> _faults.Struck:
    return _faults.kill_rank(job, trial % RANKS)


# ---- stages


def _parts_of_rekindle(job: Job, kill: Trial) -> Parts:
    """Return the milliseconds of each stage, from the job's journal and the lines of its ranks."""
    journal_file = next((job.folder / _jobs.HOME).glob("jobs/*/journal.jsonl"))
    events = [json.loads(line) for line in journal_file.read_text().splitlines()]
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

    parts = stages(
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


def _first(lines: list[_jobs.Line], event: str) -> float:
    return min(line.at for line in lines if line.event == event)


# ---- results


def _floor(rekindle: Side, forming: list[float]) -> dict[str, float]:
    """Return a lower limit for the replacement of a process: the minimum of each stage here."""
    kernel, fork, script = list(rekindle.by_part().values())[:3]
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
            **rekindle.counts(),
            "healthy_processes_replaced": rekindle.pids_changed,
        },
        "torchrun": {
            **theirs,
            **torchrun.counts(),
            "extra_restarts": torchrun.extra_restarts,
        },
        "ratio": ratio(theirs, ours),
        "parts": {side.name: side.by_part() for side in (rekindle, torchrun)},
        "floor": {"total_ms": round(sum(floor.values()), 1), "parts_ms": floor},
        "forming": summary(forming),
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
        show_summaries(f"where {side.name}'s time goes, ms", side.by_part())
    floor = result["floor"]
    print("\nfloor of replacing a process (the least of each stage here, and a usual step):")
    print(" + ".join(f"{name} {ms}" for name, ms in floor["parts_ms"].items()), end=" ")
    print(f"= {floor['total_ms']} ms")


if __name__ == "__main__":
    main()
