"""Measure checks of nodes, some of them faulty: whether exactly these are named, and the time.

Nodes are simulated; their agents and checkers are real processes. The checkers of faulty nodes are
killed repeatedly, or a product takes 50 ms longer there. Nodes on one machine take turns, and its
cores are never idle. So a node counts as slow here if it takes at least 5 times as long. Random
sets of up to half of all nodes are simulated, with the noise of accelerators.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _checks import compared
from _common import ROOT, Conditions, finish, need_torch, number, options, place, table

from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.verdicts import Health

sys.path.insert(0, str(ROOT / "tests"))
from checked.simulated import Cluster, any_fault, sets
from checked.trouble import Killer, slow

SIZES = (4, 5, 6, 8, 16)
LIMIT_S = 300.0
SETS = 500
SLOW_S = 0.05


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    said = "folder of the programs of an environment with DLRover: its check is timed beside ours"
    parser.add_argument("--dlrover", type=Path, metavar="BIN", help=said)
    parser.add_argument("--only-dlrover", action="store_true", help="nothing but that")
    args = parser.parse_args()
    need_torch()
    conditions = Conditions()
    chance = random.Random(args.seed)
    beside: dict[str, Any] = {}
    if args.dlrover is not None:
        with place() as folder:
            beside = compared(folder, args.dlrover, 1 if args.quick else 3)
        print(f"the check alone: {beside['check_s']} s, ratio {beside['dlrover_ratio']}")
        if args.only_dlrover:
            finish(beside, conditions, args.json)
            return
    sizes = SIZES[:2] if args.quick else SIZES
    rows, exact, took = [], 0, {}
    with place() as folder:
        took = {"4": _rounds(folder, 2 if args.quick else 5)}
        for size in sizes:
            for count in range(1, size // 4 + 1):
                for health in (Health.FAULTY, Health.STRAGGLER):
                    sick = {f"local-{node}" for node in chance.sample(range(size), count)}
                    here = folder / f"{size}-{count}-{health.value}"
                    named, seconds = _check(here, size, sick, health)
                    right = named == dict.fromkeys(sick, health)
                    exact += right
                    said = "yes" if right else str(named)
                    rows.append((str(size), str(count), health.value, said, number(seconds)))
                    print(f"{size} nodes, {count} {health.value}: {said}", flush=True)
    accused = _simulated()
    table(("nodes", "sick", "as", "exactly named", "seconds"), rows)
    result: dict[str, Any] = {
        "exact_up_to_quarter": round(exact / len(rows), 3),
        "healthy_accused": accused,
        "seconds": round(statistics.median(took["4"]), 2),
        "sets": len(rows),
        "simulated_sets": SETS,
        **beside,
    }
    finish(result, conditions, args.json)


def _rounds(folder: Path, count: int) -> list[float]:
    """Return the seconds that checks of four healthy nodes take."""
    return [_check(folder / f"healthy-{n}", 4, set(), Health.HEALTHY)[1] for n in range(count)]


def _check(
    folder: Path, size: int, sick: set[str], health: Health
) -> tuple[dict[str, Health], float]:
    """Check nodes; return those that it names, and the seconds from the job's start to that."""
    folder.mkdir()
    environment = os.environ | {"REKINDLE_HOME": str(folder)}
    command = [sys.executable, "-m", "rekindle.cli.main", "run", "--exclude-straggler"]
    command += ["--compute-factor", "5", "--link-factor", "5", "--nnodes", f"1:{size}"]
    command += ["--job-id", "check", "-m", "rekindle.training.node_check"]
    if health is Health.STRAGGLER:
        environment |= slow(*sick, seconds=SLOW_S)
    with ExitStack() as stack:
        if health is Health.FAULTY:
            for host in sick:
                stack.enter_context(Killer(host, folder))
        with (folder / "output").open("w") as output:
            # The benchmark ignores whether the job can continue without its faulty nodes.
            subprocess.run(
                command,
                env=environment,
                stdout=output,
                stderr=output,
                timeout=LIMIT_S,
                check=False,
            )
    events = journal.read((folder / "jobs/check/journal.jsonl").read_bytes().splitlines())
    checks = [event for event in events if isinstance(event, journal.NodeChecked)][:size]
    named = {e.host: e.verdict.health for e in checks if e.verdict.health is not Health.HEALTHY}
    return named, checks[-1].at - events[0].at


def _simulated() -> int:
    """Return how many healthy nodes were blamed in random sets with up to half of them faulty."""
    accused = 0
    for size, bad, chance in sets(SETS, 0.5):
        found = Cluster(range(size), {n: any_fault(chance) for n in bad}, len(bad)).check()
        wrong = (Health.FAULTY, Health.STRAGGLER)
        accused += sum(each.health in wrong for node, each in found.items() if node not in bad)
    return accused


if __name__ == "__main__":
    main()
