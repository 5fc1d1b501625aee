"""Measure from the command to the first step of all 4 ranks: `rekindle run` and torchrun.

Both start the same small GPT without a checkpoint, in turn. Each of torchrun's ranks imports torch;
Rekindle forks its ranks from a process that has imported torch once.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _jobs
from _common import (
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

STEPS = 10_000_000  # the benchmark ends the job after the first step
LIMIT_S = 120.0
QUICK_S = 40.0

Parts = dict[str, float]


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, help="starts of each (default: 11, quick: 3)")
    parser.add_argument("--size", default="tiny", help="of the model, as in examples/charlm")
    args = parser.parse_args()
    need_torch()
    conditions = Conditions()
    sides: dict[str, tuple[Callable[[Path], Job], Callable[[Job], Parts]]] = {
        "rekindle": (lambda f: _rekindle(f, args.size), _parts_of_rekindle),
        "torchrun": (lambda f: _torchrun(f, args.size), _parts_of_torchrun),
    }
    seen: dict[str, list[Parts]] = {name: [] for name in sides}
    loads: list[float] = []
    began = time.monotonic()
    with place() as folder:
        for trial in range(args.trials or (3 if args.quick else 11)):
            loads.append(load())
            for name, (start, explain) in sides.items():
                with start(folder / f"{name}{trial}") as job:
                    seen[name].append(_measure(name, job, explain))
            if args.quick and time.monotonic() - began > QUICK_S:
                break
    result = _result(seen, loads)
    _show(result)
    finish(result, conditions, args.json)


def _rekindle(folder: Path, size: str) -> Job:
    return _jobs.rekindle(folder, "_rank_session.py", [size, STEPS])


def _torchrun(folder: Path, size: str) -> Job:
    return _jobs.torchrun(folder, "_rank_plain.py", [size, STEPS, 0])


def _measure(name: str, job: Job, explain: Callable[[Job], Parts]) -> Parts:
    """Wait for the first step of all ranks; return the stages until then, in ms."""
    if job.wait_all("step", limit_s=LIMIT_S) is None:
        raise SystemExit(f"{name} did not train:\n{job.output()}")
    time.sleep(0.2)  # until the job has written its own record
    parts = explain(job)
    print(f"  {name}: first step of all after {sum(parts.values()):,.0f} ms", flush=True)
    return parts


def _parts_of_rekindle(job: Job) -> Parts:
    """Return the milliseconds of each stage, from the job's journal and the lines of its ranks."""
    journal_file = next((job.folder / _jobs.HOME).glob("jobs/*/journal.jsonl"))
    events = [json.loads(line) for line in journal_file.read_text().splitlines()]
    at = {event["type"]: float(event["at"]) for event in reversed(events)}
    return _stages(
        job,
        {
            "command read, coordinator up": at["job-started"],
            "agent up": at["node-joined"],
            "fork server imported torch, store up, ranks up": _last(job, "up"),
            "script: until its Session": _last(job, "ready"),
            "all arrived": at["formed"],
            "group formed": at["restored"],
            "first step of all ranks": _last_first_step(job),
        },
    )


def _parts_of_torchrun(job: Job) -> Parts:
    """Return the milliseconds of each stage, from the lines of the ranks."""
    return _stages(
        job,
        {
            "command read, torch imported, rendezvous, ranks up": _last(job, "up"),
            "imports, model": _last(job, "ready"),
            "group formed, first step of all ranks": _last_first_step(job),
        },
    )


def _stages(job: Job, ends: dict[str, float]) -> Parts:
    parts, last = {}, job.started
    for name, end in ends.items():
        parts[name] = (end - last) * 1000
        last = end
    return parts


def _last(job: Job, event: str) -> float:
    return max(line.at for line in job.first_after(event).values())


def _last_first_step(job: Job) -> float:
    return _last(job, "step")


# ---- results


def _result(seen: dict[str, list[Parts]], loads: list[float]) -> dict[str, Any]:
    totals = {name: [sum(parts.values()) for parts in trials] for name, trials in seen.items()}
    result: dict[str, Any] = {name: summary(values) for name, values in totals.items()}
    result["ratio"] = ratio(result["torchrun"], result["rekindle"])
    pairs = zip(totals["torchrun"], totals["rekindle"], strict=True)
    result["ratio_of_pairs_median"] = round(statistics.median(a / b for a, b in pairs), 2)
    result["parts"] = {
        name: {part: summary([trial[part] for trial in trials]) for part in trials[0]}
        for name, trials in seen.items()
    }
    result["load_median"] = statistics.median(loads)
    return result


def _show(result: dict[str, Any]) -> None:
    names = ("rekindle", "torchrun")
    show_summaries("command -> first step of all 4 ranks, ms", {n: result[n] for n in names})
    print(f"ratio of medians: {result['ratio']}, median of the pairs' ratios: ", end="")
    print(result["ratio_of_pairs_median"])
    for name in names:
        show_summaries(f"where {name}'s time goes, ms", result["parts"][name])


if __name__ == "__main__":
    main()
