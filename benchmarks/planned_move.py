"""Measure how long training stops when a node moves to a warm spare (`rekindle drain`).

One Rekindle job of 2 simulated nodes and a spare trains a small GPT. In turn, node 0 and node 1
move to the spare, while nothing is broken. The time of a move begins when the first rank finishes
the last step before it, and ends when every rank has finished the next step. So it contains one
step. Node 0 also hosts the ranks' store, and another node must start a new one.

The job has 4 ranks, or one for each processor of a smaller machine. With more ranks than
processors, a move would contain the time in which ranks wait for a processor.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import _faults
import _jobs
from _common import Conditions, finish, need_torch, options, place, show_summaries, summary
from _jobs import Job
from _trials import SETTLE_STEPS, START_S, STEPS, step_times

from rekindle.protocol.http_views import Drain

NODES = 2
MOST_RANKS = 4
LIMIT_S = 60.0
TARGET_MS = 100.0  # in addition to one step


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, help="moves (default: 20, quick: 4)")
    parser.add_argument("--size", default="tiny", help="of the model, as in examples/charlm")
    args = parser.parse_args()
    need_torch()
    trials = args.trials or (4 if args.quick else 20)
    to_stdout = args.json == Path("/dev/stdout")
    with contextlib.redirect_stdout(sys.stderr if to_stdout else sys.stdout), place() as folder:
        conditions = Conditions()
        extra = ["--spares", "1", "--snapshot-every", "0"]
        sizes, ranks = (
            [args.size, STEPS],
            max(NODES, min(MOST_RANKS, os.cpu_count() or 1)) // NODES * NODES,
        )
        with _jobs.rekindle(
            folder / "job", "_rank_session.py", sizes, extra, ranks=ranks, nodes=NODES
        ) as job:
            result = {"ranks": ranks} | _measure(job, trials)
        finish(result, conditions, args.json)


def _measure(job: Job, trials: int) -> dict[str, Any]:
    if not job.wait_steps(SETTLE_STEPS, limit_s=START_S):
        raise SystemExit(f"the job did not train:\n{job.output()}")
    moves, steps, lost = [], list[float](), []
    for trial in range(trials):
        _faults.wait_spare(job)
        began = time.time()
        if not job.wait_steps(SETTLE_STEPS):
            raise SystemExit(f"the job stopped training:\n{job.output()}")
        steps += step_times(job, began)
        moves.append(_move(job, trial % NODES))
        lost.append(_faults.incidents(job)[-1].steps_lost or 0)
        print(f"  node {trial % NODES} moved in {moves[-1]:,.0f} ms", flush=True)
    faults = [each for each in _faults.incidents(job) if not each.planned]
    step_ms = statistics.median(steps)
    result = {
        "move_ms": summary(moves),
        "steps_lost": sum(lost),
        "step_ms": round(step_ms, 1),
        "faults": len(faults),
        "target_ms": round(step_ms + TARGET_MS, 1),
    }
    show_summaries(
        "a node moves to a spare: step -> next step of all ranks, ms", {"": summary(moves)}
    )
    print(f"a step takes {step_ms:.1f} ms otherwise; {sum(lost)} steps lost; {len(faults)} faults")
    return result


def _move(job: Job, node: int) -> float:
    """Move a node, and return the milliseconds between two steps."""
    before = job.incarnation
    run = _faults.handle(job)
    run.client().drain(Drain(node=node, by="benchmark"))
    found = job.wait_all("step", incarnation=before + 1, limit_s=LIMIT_S)
    if found is None:
        raise SystemExit(f"node {node} did not move:\n{job.output()}")
    first = min(line.number for line in found.values())
    last = [x.at for x in job.lines if x.event == "step" and x.number == first - 1]
    run.wait_until(lambda: run.incidents()[-1].closed, "the end of the move")
    return (max(line.at for line in found.values()) - min(last)) * 1000


if __name__ == "__main__":
    main()
