"""Measure how much longer a step takes with Rekindle's Session than without it, without faults.

Within one job, each rank trains the same model alternately as a plain script and through the
Session. Process, process group, cores and other nodes are the same for both. Each ratio compares
two consecutive blocks of steps. Rekindle's own processes (agent, coordinator and so on) slow down
both sides equally. So their use of the cores is measured as CPU time, and added to the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import _jobs
import psutil
from _common import Conditions, finish, load, need_torch, number, options, place, summary, table
from _jobs import Job

LIMIT_S = 900.0
MODES = {"none": 0, "snapshot_every_10": 10, "snapshot_every_1": 1}
TARGET = 1.004
HABITS_TARGET = 1.02
LARGE_MB = 100
COMPARED = 64  # steps between two comparisons of digests
PLAIN, NO_DIGESTS = "plain", "no-digests"  # what the Session is compared with
OF = ("snapshot", "memcpy")
CORES = os.cpu_count() or 1

Pair = tuple[float, float, float, float]


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=min(4, CORES), help="default: one per core")
    parser.add_argument("--size", default="tiny", help="of the model, as in examples/charlm")
    parser.add_argument(
        "--seconds", type=int, help="of training without snapshots (default: 150, quick: 10)"
    )
    args = parser.parse_args()
    need_torch()
    args.seconds = args.seconds or (10 if args.quick else 150)
    conditions = Conditions()
    result: dict[str, Any] = {"ranks": args.ranks, "size": args.size}
    with place() as folder:
        for name, every in MODES.items():
            result[name] = _mode(folder / name, args, every)
            _show_mode(name, result[name])
        result["digests"] = _digests(folder / "digests", args)
        result["habits_model"] = _mode(folder / "habits", args, 0, size="habits")
        _show_mode("a model with BatchNorm, EMA, a meter, a generator", result["habits_model"])
        result["snapshot"] = {
            "example": result["snapshot_every_1"].pop("snapshot"),
            f"{LARGE_MB}_MB": _large_snapshot(folder / "large", 20 if args.quick else 100),
        }
    result["snapshot"]["over_memcpy"] = result["snapshot"][f"{LARGE_MB}_MB"]["over_memcpy"]
    _show_snapshots(result["snapshot"])
    _show_verdict(result["none"])
    _show_others(result)
    finish(result, conditions, args.json)


# ---- one interval of snapshots


def _mode(folder: Path, args: argparse.Namespace, every: int, *, size: str = "") -> dict[str, Any]:
    """Run one job and compare its pairs of blocks."""
    # Without snapshots single steps alternate; with snapshots a block contains a complete interval.
    length, seconds = (10, args.seconds // 2) if every else (1, args.seconds)
    arguments = [size or args.size, seconds, length, 30 if args.quick else 200, PLAIN]
    extra = ["--snapshot-every", str(every)]
    with _jobs.rekindle(folder, "_rank_overhead.py", arguments, extra, ranks=args.ranks) as job:
        helpers = _helpers_share(job)
        _wait(job, "written")
        timed = json.loads((folder / "times0.json").read_text())
    mode = _compare(timed["pairs"], length, helpers) | _own_work(timed)
    return mode | ({"snapshot": _against_copy(timed)} if every == 1 else {})


def _digests(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Compare blocks with one comparison of digests each, and the same blocks without it."""
    arguments = [args.size, args.seconds, COMPARED, 1, NO_DIGESTS]
    extra = ["--snapshot-every", "0"]
    with _jobs.rekindle(folder, "_rank_overhead.py", arguments, extra, ranks=args.ranks) as job:
        _wait(job, "written")
        timed = json.loads((folder / "times0.json").read_text())
    return _compare(timed["pairs"], COMPARED, 0.0)


def _compare(pairs: list[Pair], length: int, helpers: float) -> dict[str, Any]:
    """Return the ratios of the Session's blocks to the plain blocks next to them."""
    walls = [session / plain for plain, session, _, _ in pairs]
    cpus = [session / plain for _, _, plain, session in pairs]
    in_step = statistics.median(walls)
    return {
        "ratio": round(in_step + helpers, 4),
        "ratio_in_step": round(in_step, 4),
        "ratio_standard_error": round(_error_of_median(walls), 4),
        "ratio_cpu_of_rank": round(statistics.median(cpus), 4),
        "ratio_cpu_standard_error": round(_error_of_median(cpus), 4),
        "helpers_share_of_cores": round(helpers, 5),
        "plain_step_ms": round(statistics.median(p[0] for p in pairs) / length * 1000, 3),
        "session_step_ms": round(statistics.median(p[1] for p in pairs) / length * 1000, 3),
        "plain_cpu_ms": round(statistics.median(p[2] for p in pairs) / length * 1000, 3),
        "count": len(pairs),
        "steps_per_block": length,
        "load": load(),
    }


def _error_of_median(values: list[float]) -> float:
    """Return the standard error of the median, by bootstrap."""
    chance = random.Random(0)
    draws = [statistics.median(chance.choices(values, k=len(values))) for _ in range(200)]
    return statistics.stdev(draws)


def _own_work(timed: dict[str, Any]) -> dict[str, Any]:
    """Return the CPU microseconds per step of the Session's calls, and of the plain script's."""
    ours, plain = timed["own_us"], timed["plain_us"]
    return {
        "cpu_us_per_step": _median_sum(ours),
        "cpu_us_parts": _median_parts(ours),
        "plain_cpu_us_per_step": _median_sum(plain),
        "plain_cpu_us_parts": _median_parts(plain),
    }


def _median_sum(steps: list[dict[str, float]]) -> float:
    return round(statistics.median(sum(step.values()) for step in steps), 1)


def _median_parts(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(s[name] for s in steps), 1) for name in steps[0]}


def _helpers_share(job: Job) -> float:
    """Return the share of all cores that Rekindle's other processes use while the ranks train."""
    _wait(job, "begin")
    ranks = {job.pid(rank) for rank in range(job.ranks)}
    helpers = [process for process in job.family() if process.pid not in ranks]
    begin, cpu = time.monotonic(), _cpu_seconds(helpers)
    _wait(job, "end")
    used = _cpu_seconds(helpers) - cpu
    return used / (time.monotonic() - begin) / CORES


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(t.user + t.system for t in times)


def _wait(job: Job, event: str) -> None:
    if job.wait_all(event, limit_s=LIMIT_S) is None:
        raise SystemExit(f"the job did not come to {event!r}:\n{job.output()}")


# ---- one snapshot


def _large_snapshot(folder: Path, times: int) -> dict[str, Any]:
    """Measure snapshots of a large state in a job with one rank."""
    arguments, extra = [LARGE_MB, times], ["--snapshot-every", "1"]
    with _jobs.rekindle(folder, "_rank_snapshot.py", arguments, extra, ranks=1) as job:
        _wait(job, "written")
        return _against_copy(json.loads((folder / "snapshots.json").read_text()))


def _against_copy(found: dict[str, Any]) -> dict[str, Any]:
    """Compare the time of a rank's snapshots with a plain copy of the same bytes."""
    snapshots, copies = ([pair[i] * 1000 for pair in found["ends"]] for i in (0, 1))
    snapshot, copy = summary(snapshots), summary(copies)
    return {
        "bytes": found["bytes"],
        "tensors": found["tensors"],
        "snapshot": snapshot,
        "memcpy": copy,
        "over_memcpy": round(snapshot["median_ms"] / copy["median_ms"], 2),
    }


# ---- results


def _show_mode(name: str, mode: dict[str, Any]) -> None:
    head = (name, "ratio", "std. error", "in the step", "CPU of rank", "std. error", "helpers")
    row = (
        f"{mode['count']} pairs of {mode['steps_per_block']}",
        *(mode[key] for key in ("ratio", "ratio_standard_error", "ratio_in_step")),
        *(mode[key] for key in ("ratio_cpu_of_rank", "ratio_cpu_standard_error")),
        mode["helpers_share_of_cores"],
    )
    table(head, [row])
    print(
        f"a plain step takes {mode['plain_step_ms']} ms ({mode['plain_cpu_ms']} ms CPU); of it the "
        f"plain script's sampler and log {_listed(mode, 'plain_cpu_us')}\n"
        f"the Session's own work {_listed(mode, 'cpu_us')}; load {mode['load']}"
    )


def _listed(mode: dict[str, Any], key: str) -> str:
    parts = ", ".join(f"{part} {us}" for part, us in mode[f"{key}_parts"].items())
    return f"{mode[f'{key}_per_step']} us CPU ({parts})"


def _show_snapshots(found: dict[str, Any]) -> None:
    rows = []
    for name, one in found.items():
        if isinstance(one, dict):
            times = [number(one[of][f"{key}_ms"]) for of in OF for key in ("min", "median", "max")]
            size = f"{one['bytes'] / 1e6:.1f} MB in {one['tensors']}"
            rows.append((name, size, *times, one["over_memcpy"], one["snapshot"]["count"]))
    of = ("min", "median", "max")
    head = ("one snapshot, ms", "state", *of, *(f"copy {key}" for key in of), "ratio", "count")
    table(head, rows)


def _show_verdict(mode: dict[str, Any]) -> None:
    ratio, error = mode["ratio"], mode["ratio_standard_error"]
    own = mode["cpu_us_per_step"] - mode["plain_cpu_us_per_step"]
    print(
        f"\nwithout snapshots a step takes {(ratio - 1) * 100:.2f} % longer (standard error "
        f"{error * 100:.2f} %), {mode['helpers_share_of_cores'] * 100:.2f} % of it for agent and "
        f"coordinator; by CPU time the rank does {own:.0f} us more per step, "
        f"{own / mode['plain_cpu_ms'] / 10:.2f} % of a plain step"
    )
    target = f"the target of at most {(TARGET - 1) * 100:.1f} %"
    if abs(ratio - TARGET) < 2 * error:
        print(f"that is too uncertain to be told from {target}: more --seconds, or less load")
    else:
        print(f"that {'meets' if ratio < TARGET else 'misses'} {target}")


def _show_others(result: dict[str, Any]) -> None:
    digests, habits = result["digests"], result["habits_model"]
    print(
        f"digests: a step takes {(digests['ratio'] - 1) * 100:.2f} % longer than without them "
        f"(standard error {digests['ratio_standard_error'] * 100:.2f} %)\n"
        f"a model with BatchNorm, EMA, a meter and a generator: {(habits['ratio'] - 1) * 100:.2f} "
        f"% of a step of {habits['plain_step_ms']} ms (standard error "
        f"{habits['ratio_standard_error'] * 100:.2f} %); the target is at most "
        f"{(HABITS_TARGET - 1) * 100:.0f} %"
    )


if __name__ == "__main__":
    main()
