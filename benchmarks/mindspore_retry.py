"""Measure MindSpore on CPU: fault to next step, with repair in the processes and with restarts.

The example on handwritten digits (4 ranks, 60 steps, shuffled, a decreasing learning rate) has
damaged memory and killed ranks in turn. Its losses are compared with a run without faults. In
another job, blocks of steps with and without the gate take turns.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from _common import (
    HERE,
    ROOT,
    Conditions,
    clean_environment,
    finish,
    number,
    options,
    place,
    show_summaries,
    summary,
)

from rekindle.job.spec import job_directory
from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.recovery.policy.policy import Strategy
from rekindle.testing.handle import JobHandle

EXAMPLE = ROOT / "examples" / "mindspore_uce" / "train.py"
RANKS, STEPS = 4, 60
LIMIT_S = 300.0
TARGET_MS = 1.0


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    python = ROOT / ".venv-mindspore" / "bin" / "python"
    said = "MindSpore's interpreter; default: that of `make mindspore`"
    parser.add_argument("--python", type=Path, default=python, help=said)
    parser.add_argument("--seed", type=int, default=0, help="of the faults' steps and ranks")
    args = parser.parse_args()
    if not args.python.exists():
        print(f"{args.python} is missing: nothing was measured. `make mindspore`", file=sys.stderr)
        sys.exit(2)
    conditions = Conditions()
    chance = random.Random(args.seed)
    rounds = 1 if args.quick else 4
    took: dict[Strategy, list[float]] = {Strategy.RETRY: [], Strategy.RESTART: []}
    identical, unwritten = True, 0
    with place() as folder:
        gate = _gate(args.python, folder, 400 if args.quick else 4000)
        wanted = _losses(_run(args.python, folder, "undisturbed", []))
        for each in range(rounds):
            steps = sorted(chance.sample(range(2, STEPS), 5))
            kinds = [InjectionKind.UCE, InjectionKind.KILL] * 3
            faults = [
                Inject(rank=chance.randrange(RANKS), kind=kind, step=step)
                for kind, step in zip(kinds, steps, strict=False)
            ]
            job = _run(args.python, folder, f"round-{each}", faults)
            identical, without = _compared(_losses(job), wanted, identical)
            unwritten += without
            for incident in job.incidents():
                seconds = incident.first_step - incident.detected
                took[incident.strategies[-1]].append(1000 * seconds)
    rows = {strategy.value: summary(times) for strategy, times in took.items()}
    show_summaries("a fault to the next step of all ranks (ms)", rows)
    print(
        f"the gate adds {gate.added_ms:.3f} +- {gate.error_ms:.3f} ms to a step (target: under "
        f"{number(TARGET_MS)}); from the last rank's arrival it takes {gate.own_ms:.3f} ms"
    )
    print(f"all losses are those of the undisturbed run: {identical}; not written: {unwritten}")
    result: dict[str, Any] = {
        "gate_ms": round(gate.added_ms, 3),
        "gate_error_ms": round(gate.error_ms, 3),
        "gate_own_ms": round(gate.own_ms, 3),
        "retry_ms": rows["retry"].get("median_ms"),
        "restart_ms": rows["restart"].get("median_ms"),
        "loss_identical": identical,
        "losses_not_written": unwritten,
        "by_strategy": rows,
    }
    finish(result, conditions, args.json)


def _environment(folder: Path) -> dict[str, str]:
    return clean_environment(folder) | {"PYTHONPATH": str(ROOT), "GLOG_v": "3"}


def _command(python: Path, name: str, *script: str) -> list[str]:
    run = [str(python), "-m", "rekindle.cli.main", "run", "--framework", "mindspore"]
    run += ["--nproc-per-node", str(RANKS), "--job-id", name, "--allow-injection"]
    return [*run, "--max-restarts", "9", *script]


def _run(python: Path, folder: Path, name: str, faults: list[Inject]) -> JobHandle:
    """Run the example to its end, with these faults; return its handle."""
    handle = JobHandle(job_directory(name, at=folder), limit_s=60.0)
    command = _command(python, name, str(EXAMPLE), "--shuffle", "--decay")
    with (folder / f"{name}.log").open("w") as log:
        job = subprocess.Popen(command, env=_environment(folder), stdout=log, stderr=log)
        try:
            for fault in faults:
                handle.inject(fault.kind, rank=fault.rank, step=fault.step)
            status = job.wait(LIMIT_S)
        finally:
            job.terminate()
            job.wait(60)
    if status:
        raise SystemExit(f"{name} has failed:\n{(folder / f'{name}.log').read_text()[-3000:]}")
    return handle


class GateCost(NamedTuple):
    """The time that the gate needs, in milliseconds.

    added_ms: the time that it adds to a step, from paired blocks with and without the gate. It may
    be below 0: a step takes less time if all ranks begin it together. error_ms: its standard error.
    own_ms: the median time in the gate of the last rank, which waits for no other rank.
    """

    added_ms: float
    error_ms: float
    own_ms: float


def _gate(python: Path, folder: Path, steps: int) -> GateCost:
    """Train in blocks of steps with and without the gate."""
    times = folder / "gate"
    times.mkdir()
    script = str(HERE / "_rank_mindspore_gate.py")
    command = _command(python, "gate", script, str(times), str(steps))
    with (folder / "gate.log").open("w") as log:
        subprocess.run(
            command,
            env=_environment(folder),
            stdout=log,
            stderr=log,
            check=True,
            timeout=LIMIT_S + steps,
        )
    ranks = [json.loads((times / f"{rank}.json").read_text()) for rank in range(RANKS)]
    blocks = ranks[0]["blocks"]
    pairs = [(a, b) for a, b in zip(blocks[::2], blocks[1::2], strict=False) if a[0] is not b[0]]
    added = [1000 * (a[1] - b[1]) * (1 if a[0] else -1) for a, b in pairs]
    of_ranks = [dict(rank["inside"]) for rank in ranks]
    last = [1000 * min(each[step] for each in of_ranks) for step in of_ranks[0]]
    error = statistics.stdev(added) / math.sqrt(len(added))
    return GateCost(statistics.mean(added), error, statistics.median(last))


def _compared(
    found: list[dict[int, float]], wanted: list[dict[int, float]], so_far: bool
) -> tuple[bool, int]:
    """Return whether all losses equal the undisturbed run's, and the number of missing losses.

    A loss is missing if its rank is killed while its peers can finish the step without the rank.
    """
    pairs = list(zip(found, wanted, strict=True))
    same = all(loss == of[step] for each, of in pairs for step, loss in each.items())
    return so_far and same, sum(len(of) - len(each) for each, of in pairs)


def _losses(job: JobHandle) -> list[dict[int, float]]:
    """Return the loss of each step of each rank; the newest one, if a step was repeated."""
    records = job.records()
    return [{s: each.metrics["loss"] for s, each in records[r].items()} for r in range(RANKS)]


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
