"""Measure what light profiling costs each step: off, on, and with records of collectives.

Within one job, blocks of steps follow each other in a changing order. Each is compared with the
block without profiling in the same turn. A second block without profiling shows the effect of the
machine's noise alone.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import _jobs
from _common import Conditions, finish, need_torch, number, options, place, table
from overhead import _error_of_median, _wait

from rekindle.profiling.files import lines_of, rank_folders

LENGTH = 40  # steps of a block
TARGET = 1.01
KEYS = {
    "off again": "off_over_off",
    "on": "on_over_off",
    "with communication": "on_with_communication_over_off",
}


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--size", default="tiny", help="of the model, as in examples/charlm")
    parser.add_argument("--seconds", type=int, help="of training (default: 240, quick: 30)")
    args = parser.parse_args()
    need_torch()
    seconds = args.seconds or (30 if args.quick else 240)
    conditions = Conditions()
    with place() as folder:
        arguments = [args.size, seconds, LENGTH]
        with _jobs.rekindle(folder / "job", "_rank_profiled.py", arguments, ranks=2) as job:
            _wait(job, "written")
            turns = json.loads((folder / "job" / "times0.json").read_text())
            per_step = _records(folder / "job")
    result: dict[str, Any] = {"size": args.size, "turns": len(turns), "records_per_step": per_step}
    rows = []
    for mode, key in KEYS.items():
        step_ms = statistics.median(turn[mode][0] for turn in turns) / LENGTH * 1000
        result[key], figures = {"step_ms": round(step_ms, 3)}, []
        for of, index in (("wall", 0), ("cpu", 1)):
            ratios = [turn[mode][index] / turn["off"][index] for turn in turns]
            ratio, error = statistics.median(ratios), _error_of_median(ratios)
            interval = [round(ratio - 2 * error, 4), round(ratio + 2 * error, 4)]
            result[key] |= {of: round(ratio, 4), f"{of}_interval": interval}
            figures += [f"{ratio:.4f}", f"{error:.4f}"]
        rows.append((mode, number(step_ms), *figures))
    heads = ("times off", "std. error", "its CPU time", "std. error")
    table(("profiling", "step (ms)", *heads), rows)
    print(f"target: on without communication at most {TARGET}")
    finish(result, conditions, args.json)


def _records(folder: Path) -> float:
    """Return the mean number of records that a rank makes per step, over all written records."""
    (task,) = folder.rglob("default_task_id_*")
    lines = list(lines_of(rank_folders(task)[0]))
    steps = sum(b'"step ' in line for line in lines) / 2
    return round(len(lines) / steps, 1)


if __name__ == "__main__":
    main()
