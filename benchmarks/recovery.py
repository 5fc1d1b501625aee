"""Measure the time from a fault to the next step of all 4 ranks, by strategy, and with torchrun.

One Rekindle job (2 simulated nodes x 2 ranks and a spare) and one of torchrun train the same small
GPT with an additional table. The table gives the state the requested size, while a step stays fast.
Both jobs run for the complete measurement. In turn, one of them runs at full speed (the other does
one step per second) and has a fault:

    retry             a rank raises an exception that the script declares as transient
    retry-uce         a rank's device memory is damaged: its state comes from a peer
    recover-in-place  a rank gets SIGKILL
    recover           a node's agent gets SIGKILL when a spare has imported torch
    torchrun          a rank gets SIGKILL; all ranks start again from a checkpoint on disk
    torchft           a rank, its own replica group, gets SIGKILL; if torchft is installed
    dlrover           as torchrun, under dlrover-run; if dlrover is installed

torchft's other ranks continue without the lost rank: the time until then is shown as a part. The
steps that torchrun repeats since its checkpoint do not count against it. It runs with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
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
    number,
    options,
    place,
    ratio,
    show_summaries,
    summary,
    table,
)
from _faults import Struck
from _jobs import Job
from _trials import STEPS, Parts, Runner, Side, Trial, parts_of_torchft, parts_of_torchrun, stages

from rekindle.protocol.agent import InjectionKind

SIZES_MB = {"small": 7, "100m": 100, "1g": 1000}  # parameters and their Adam moments
NODES = 2
EVERY = 50  # steps between torchrun's checkpoints
QUICK_S = 20.0
COPY_TARGET = 0.8  # a part of a plain send's rate
TARGETS_MS = {"retry": 100, "recover-in-place": 200, "recover": 300}  # for the small state
OTHERS = ("torchft", "dlrover")

STRIKES: dict[str, Callable[[Job, int], Struck]] = {
    "retry": lambda job, i: _faults.inject(job, i % RANKS, InjectionKind.EXCEPTION),
    "retry-uce": lambda job, i: _faults.inject(job, i % RANKS, InjectionKind.UCE),
    "recover-in-place": lambda job, i: _faults.kill_rank(job, i % RANKS),
    "recover": lambda job, i: _faults.lose_node(job, i % NODES),
}


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, help="faults of each kind (default: 15, quick: 2)")
    parser.add_argument("--size", choices=SIZES_MB, default="small", help="of the state")
    args = parser.parse_args()
    need_torch()
    conditions = Conditions()
    sides = _sides(f"tiny+{SIZES_MB[args.size]}")
    began = time.monotonic()
    with place() as folder:
        try:
            for trial in range(args.trials or (2 if args.quick else 15)):
                for side in sides:
                    side.trial(folder, trial)
                if args.quick and time.monotonic() - began > QUICK_S:
                    break
        finally:
            for runner in {side.runner for side in sides}:
                runner.end()
        state_bytes = SIZES_MB[args.size] * 1_000_000
        plain = milliseconds_of("_sending.py", state_bytes, 3 if args.quick else 15)
    result = {"size": args.size, "state_bytes": state_bytes, **_result(sides, plain)}
    _show(result)
    finish(result, conditions, args.json)


def _sides(size: str) -> list[Side]:
    def start_rekindle(folder: Path) -> Job:
        extra = ["--spares", "1", "--allow-injection", "--snapshot-every", "0"]
        return _jobs.rekindle(folder, "_rank_session.py", [size, STEPS], extra, nodes=NODES)

    def start_torchrun(folder: Path) -> Job:
        extra = ["--max-restarts", "1000"]
        return _jobs.torchrun(folder, "_rank_plain.py", [size, STEPS, EVERY], extra)

    rekindle = Runner("rekindle", start_rekindle)
    torchrun = Runner("torchrun", start_torchrun, settle=EVERY + 1)  # it then has a checkpoint
    kill = STRIKES["recover-in-place"]
    sides = [
        *(Side(name, rekindle, strike, _parts) for name, strike in STRIKES.items()),
        Side("torchrun", torchrun, kill, parts_of_torchrun),
    ]
    if importlib.util.find_spec("torchft") is not None:
        torchft = Runner("torchft", lambda folder: _jobs.torchft(folder, [size, STEPS]))
        sides.append(Side("torchft", torchft, kill, parts_of_torchft))
    if importlib.util.find_spec("dlrover") is not None:
        arguments = [size, STEPS, EVERY]
        dlrover = Runner("dlrover", lambda f: _jobs.dlrover(f, arguments), settle=EVERY + 1)
        sides.append(Side("dlrover", dlrover, kill, parts_of_torchrun))
    return sides


def _parts(job: Job, trial: Trial) -> Parts:
    """Return the milliseconds of each stage, from the job's journal and the lines of its ranks."""
    incident = next(i for i in _faults.incidents(job) if i.detected >= trial.at)
    since = [line for line in job.lines if line.at >= trial.at]
    taken = {line.rank: line.at for line in since if line.event == "taken"}
    read = [
        line.at
        for line in since
        if line.event == "read" and line.rank not in taken and line.at > incident.regrouped
    ]
    formed = max(read, default=incident.restored)  # a state is sent as soon as the group is formed
    return stages(
        trial,
        {
            "detect": incident.detected,
            "leave": max((x.at for x in since if x.event == "left"), default=incident.detected),
            "plan": incident.regrouped,  # all have arrived, including new processes
            "regroup": formed,
            "copy": max(taken.values(), default=formed),
            "first step": trial.back,
        },
    )


# ---- results


def _result(sides: list[Side], plain: list[float]) -> dict[str, Any]:
    ours = {side.name: _of_side(side) for side in sides}
    torchrun = ours.pop("torchrun")
    others = {name: ours.pop(name, {"not_compared": "not installed"}) for name in OTHERS}
    return {
        "strategies": ours,
        "torchrun": torchrun,
        **others,
        "ratio": {name: ratio(torchrun, found) for name, found in ours.items()},
        "copy": _copy(ours["recover-in-place"]["parts"].get("copy", summary([])), summary(plain)),
    }


def _of_side(side: Side) -> dict[str, Any]:
    return {
        **summary(side.totals),
        **side.counts(),
        "processes_replaced_in_vain": side.pids_changed,
        "parts": side.by_part(),
    }


def _copy(copy: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Compare the transfer of the state to one replaced rank with a plain send of the same size."""
    return {"state_to_rank": copy, "plain_send": plain, "ratio": ratio(plain, copy)}


def _show(result: dict[str, Any]) -> None:
    ours, size = result["strategies"], result["size"]
    sides = {**ours, "torchrun": result["torchrun"]}
    for other in OTHERS:
        if "count" in result[other]:
            sides[other] = result[other]
        else:
            print(f"{other}: not installed, so not compared")
    rows = []
    for name, one in sides.items():
        times = (number(one.get(f"{key}_ms")) for key in ("min", "median", "max"))
        target = TARGETS_MS.get(name) if size == "small" else None
        times_as_long = result["ratio"].get(name)
        rows.append((name, *times, one["count"], target or "-", times_as_long or "-"))
    title = f"fault -> a step of all {RANKS} ranks, ms"
    table((title, "min", "median", "max", "count", "target", "torchrun takes x"), rows)
    for name, one in sides.items():
        show_summaries(f"where the time of {name} goes, ms", one["parts"])
        print(
            f"{one['not_back']} trials not back, at most {one['steps_repeated_max']} finished "
            f"steps done again, a step takes {one['step_ms']} ms otherwise"
        )
    vain = sum(one["processes_replaced_in_vain"] for one in ours.values())
    print(f"\nrekindle: {vain} healthy processes replaced; torchrun: all of them")
    copy, megabytes = result["copy"], SIZES_MB[size]
    rows = {"state to one rank": copy["state_to_rank"], "plain gloo send": copy["plain_send"]}
    show_summaries(f"{megabytes} MB from process to process, ms", rows)
    print(f"rate of the copy over that of the plain send: {copy['ratio']} (target {COPY_TARGET})")


if __name__ == "__main__":
    main()
