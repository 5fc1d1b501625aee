"""MindSpore on CPU: a fault to the next step, repaired in the processes and by starting all anew.

The example on handwritten digits (4 ranks, 60 steps, shuffled, a learning rate that falls) suffers
damaged memory and killed ranks in turn, and is compared with a run without faults. In another job
blocks of steps with the gate and without it take turns.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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

from rekindle.engines.client import JobClient
from rekindle.errors import JobError
from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy
from rekindle.runtime.protocol import Inject, InjectionKind
from rekindle.runtime.spec import JobDirectory

EXAMPLE = ROOT / "examples" / "mindspore_uce" / "train.py"
RANKS, STEPS = 4, 60
LIMIT_S = 300.0
TARGET_MS = 1.0


def main() -> None:
    """Measure, print and write."""
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
        gate = _gate(args.python, folder, 400 if args.quick else 2000)
        wanted = _losses(_run(args.python, folder, "undisturbed", []))
        for each in range(rounds):
            steps = sorted(chance.sample(range(2, STEPS), 5))
            kinds = [InjectionKind.UCE, InjectionKind.KILL] * 3
            faults = [
                Inject(rank=chance.randrange(RANKS), kind=kind, step=step)
                for kind, step in zip(kinds, steps, strict=False)
            ]
            directory = _run(args.python, folder, f"round-{each}", faults)
            identical, without = _compared(_losses(directory), wanted, identical)
            unwritten += without
            for incident in journal.incidents(_events(directory)):
                seconds = incident.first_step - incident.detected
                took[incident.strategies[-1]].append(1000 * seconds)
    rows = {strategy.value: summary(times) for strategy, times in took.items()}
    show_summaries("a fault to the next step of all ranks (ms)", rows)
    print(f"the gate: {gate:.3f} ms a step (target: under {number(TARGET_MS)})")
    print(f"all losses are those of the undisturbed run: {identical}; not written: {unwritten}")
    result: dict[str, Any] = {
        "gate_ms": round(gate, 3),
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
    run = [str(python), "-m", "rekindle.cli", "run", "--framework", "mindspore"]
    run += ["--nproc-per-node", str(RANKS), "--job-id", name, "--allow-injection"]
    return [*run, "--max-restarts", "9", *script]


def _run(python: Path, folder: Path, name: str, faults: list[Inject]) -> JobDirectory:
    """Run the example to its end, with these faults; return its directory."""
    directory = JobDirectory(folder / "jobs" / name)
    command = _command(python, name, str(EXAMPLE), "--shuffle", "--decay")
    with (folder / f"{name}.log").open("w") as log:
        job = subprocess.Popen(command, env=_environment(folder), stdout=log, stderr=log)
        try:
            _inject(job, directory, faults)
            status = job.wait(LIMIT_S)
        finally:
            job.terminate()
            job.wait(60)
    if status:
        raise SystemExit(f"{name} has failed:\n{(folder / f'{name}.log').read_text()[-3000:]}")
    return directory


def _inject(job: subprocess.Popen[bytes], directory: JobDirectory, faults: list[Inject]) -> None:
    """Tell the job of its faults before it trains."""
    deadline = time.monotonic() + 60
    while faults and job.poll() is None and time.monotonic() < deadline:
        try:
            endpoint = directory.endpoint()
            if endpoint is not None:
                JobClient(endpoint, directory.secret()).inject(faults[0])
                faults = faults[1:]
                continue
        except JobError:
            pass  # it does not listen yet
        time.sleep(0.05)
    if faults:
        raise SystemExit(f"the job took no faults: {faults[0]}")


def _gate(python: Path, folder: Path, steps: int) -> float:
    """What the gate adds to a step, in ms: the median of paired blocks."""
    file = folder / "gate.json"
    script = str(HERE / "_rank_mindspore_gate.py")
    command = _command(python, "gate", script, str(file), str(steps))
    with (folder / "gate.log").open("w") as log:
        subprocess.run(
            command,
            env=_environment(folder),
            stdout=log,
            stderr=log,
            check=True,
            timeout=LIMIT_S + steps,
        )
    blocks = json.loads(file.read_text())
    pairs = [(a, b) for a, b in zip(blocks[::2], blocks[1::2], strict=False) if a[0] is not b[0]]
    differences = [(a[1] - b[1]) * (1 if a[0] else -1) for a, b in pairs]
    return 1000 * statistics.median(differences)


def _events(directory: JobDirectory) -> list[journal.AnyEvent]:
    return journal.read(directory.ledger.read_bytes().splitlines())


def _compared(
    found: list[dict[int, float]], wanted: list[dict[int, float]], so_far: bool
) -> tuple[bool, int]:
    """Whether all losses are the undisturbed run's, and how many were not written down.

    A rank that is killed when its peers can do the step without it does not come to that.
    """
    pairs = list(zip(found, wanted, strict=True))
    same = all(loss == of[step] for each, of in pairs for step, loss in each.items())
    return so_far and same, sum(len(of) - len(each) for each, of in pairs)


def _losses(directory: JobDirectory) -> list[dict[int, float]]:
    """The loss of each step of each rank; of a step that was done again, the last."""
    found = []
    for rank in range(RANKS):
        lines = (directory.path / "metrics" / f"rank{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        found.append({each["step"]: each["metrics"]["loss"] for each in records})
    return found


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
