"""Measure how much of its time a training run makes progress while faults strike repeatedly.

4 ranks on 2 simulated nodes with a spare train a small GPT. A fault occurs in the middle of every
S seconds. The four kinds alternate: SIGKILL to a rank, SIGKILL to a node's agent, an error in the
memory of a rank's device, and an exception that the script declares as transient. Goodput is the
time that the finished steps would take without faults, divided by the elapsed time. The speed of
shared machines changes by more than the faults cost. So the time of a step without faults is
measured in each interval, in the third of its S seconds that precedes the fault.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _faults
import _jobs
from _common import (
    RANKS,
    Conditions,
    finish,
    need_torch,
    options,
    place,
    show_summaries,
    summary,
)
from _faults import Struck
from _jobs import Job
from _trials import SETTLE_STEPS, START_S, STEPS, step_times

from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.policy.policy import Policy

NODES = 2
PER_NODE = RANKS // NODES
SEED = 0
LOOK_S = 0.2
TARGETS = {60: 0.98, 15: 0.95}
# torchft's own figures for 300 GPUs: another scale, so they are no comparison.
PUBLISHED = {60: 0.812, 15: 0.190}

STRIKES: dict[str, Callable[[Job, int], Struck]] = {
    "rank killed": _faults.kill_rank,
    "node lost": lambda job, rank: _faults.lose_node(job, rank // PER_NODE),
    "device memory": lambda job, rank: _faults.inject(job, rank, InjectionKind.UCE),
    "transient": lambda job, rank: _faults.inject(job, rank, InjectionKind.EXCEPTION),
}


def main() -> None:
    """Measure, print and write the figures."""
    args = _arguments()
    need_torch()
    conditions = Conditions()
    with place() as folder, _start(folder / "job", args.size) as job:
        _settle(job)
        begin = time.time()
        faults = _strike(job, begin, args.every, _count(args))
        _train_until(job, begin + _count(args) * args.every)
        result = _result(job, begin, args.every, faults)
    result |= {"every_s": args.every, "minutes": args.minutes, "size": args.size}
    _show(result)
    finish(result, conditions, args.json)


def _arguments() -> argparse.Namespace:
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--every", type=float, help="seconds between faults (60; quick: 6)")
    parser.add_argument("--minutes", type=float, help="of faults (10; quick: 0.4)")
    parser.add_argument("--size", default="tiny", help="of the model, as in examples/charlm")
    args = parser.parse_args()
    args.every = args.every or (6.0 if args.quick else 60.0)
    args.minutes = args.minutes or (0.4 if args.quick else 10.0)
    most = Policy().max_recoveries
    if not 1 <= _count(args) <= most:
        parser.error(f"{_count(args)} faults: a job is for 1 to {most} recoveries")
    return args


def _count(args: argparse.Namespace) -> int:
    return int(args.minutes * 60 / args.every)


def _start(folder: Path, size: str) -> Job:
    extra = ["--spares", "1", "--allow-injection"]
    return _jobs.rekindle(folder, "_rank_session.py", [size, STEPS], extra, nodes=NODES)


def _settle(job: Job) -> None:
    """Wait until all ranks train and the spare is ready."""
    if not job.wait_steps(SETTLE_STEPS, limit_s=START_S):
        raise SystemExit(f"the job did not train:\n{job.output()}")
    _faults.wait_spare(job)


def _strike(job: Job, begin: float, every: float, count: int) -> list[tuple[str, Struck]]:
    """Cause the faults, each in the middle of its S seconds."""
    chance = random.Random(SEED)
    faults = []
    for i in range(count):
        _train_until(job, begin + (i + 0.5) * every)
        _faults.wait_training(job)
        kind = list(STRIKES)[i % len(STRIKES)]
        struck = STRIKES[kind](job, chance.randrange(RANKS))
        print(f"  {struck.at - begin:6.1f} s: {struck.what}", flush=True)
        faults.append((kind, struck))
    return faults


def _train_until(job: Job, until: float) -> None:
    while time.time() < until:
        if job.process.poll() is not None:
            raise SystemExit(f"the job ended:\n{job.output()}")
        time.sleep(LOOK_S)
        job.poll()


# ---- results


def _result(
    job: Job, begin: float, every: float, faults: list[tuple[str, Struck]]
) -> dict[str, Any]:
    borders = [begin + i * every for i in range(len(faults) + 1)]
    finished = [_finished(job, at) for at in borders]
    calm_ms = [_calm_ms(job, at + every / 2, every / 3) for at in borders[:-1]]
    steps = [later - earlier for earlier, later in itertools.pairwise(finished)]
    useful_ms = sum(count * step_ms for count, step_ms in zip(steps, calm_ms, strict=True))
    first, last, seconds = finished[0], finished[-1], borders[-1] - begin
    incidents = [i for i in _faults.incidents(job) if i.closed]
    recovery: dict[str, list[float]] = {kind: [] for kind in STRIKES}
    for kind, struck in faults:
        ends = [i.first_step for i in incidents if i.detected >= struck.at]
        recovery[kind] += [(end - struck.at) * 1000 for end in ends[:1]]
    return {
        "goodput": round(useful_ms / 1000 / seconds, 4),
        "committed": last - first,
        "attempted": len(_begun(job, first, last)),
        "seconds": seconds,
        "step": summary(calm_ms),
        "faults": dict(Counter(kind for kind, _ in faults)),
        "recovery": {kind: summary(times) for kind, times in recovery.items() if times},
        "strategies": dict(Counter(i.strategy.value for i in incidents if i.strategy)),
        "steps_lost": sum(i.steps_lost or 0 for i in incidents),
    }


def _calm_ms(job: Job, fault: float, seconds: float) -> float:
    """Return the mean milliseconds of a step in the seconds before a fault."""
    times = step_times(job, fault - seconds, fault)
    if not times:
        raise SystemExit(f"no step was finished in {seconds:g} s before a fault: give more --every")
    return statistics.mean(times)


def _finished(job: Job, at: float) -> int:
    """Return the steps that all ranks had finished at that time."""
    newest: dict[int, int] = {}
    for line in job.lines:
        if line.event == "step" and line.at <= at:
            newest[line.rank] = line.number
    return min(newest.values())


def _begun(job: Job, first: int, last: int) -> set[tuple[int, int]]:
    """Return the attempts at these steps: each is a step that a rank has begun in a generation."""
    return {
        (line.number, line.incarnation)
        for line in job.lines
        if line.event == "begin" and first <= line.number < last
    }


def _show(result: dict[str, Any]) -> None:
    every, strategies = result["every_s"], result["strategies"]
    show_summaries("fault -> first step of all ranks, ms", result["recovery"])
    print("strategies: " + ", ".join(f"{count} x {name}" for name, count in strategies.items()))
    print(
        f"\n{result['committed']} steps committed, {result['attempted']} attempted, "
        f"{result['steps_lost']} lost, in {result['seconds']:.0f} s with "
        f"{sum(result['faults'].values())} faults, one per {every:g} s"
    )
    step = result["step"]
    print(
        f"a step takes {step['median_ms']} ms without faults (median of the calm stretches; "
        f"{step['min_ms']} to {step['max_ms']})"
    )
    print(f"goodput: {result['goodput']:.1%}" + _target(every))
    for seconds, published in PUBLISHED.items():
        print(f"torchft publishes {published:.1%} at a fault per {seconds} s (300 GPUs)")


def _target(every: float) -> str:
    return f" (target: {TARGETS[int(every)]:.0%})" if every in TARGETS else ""


if __name__ == "__main__":
    main()
