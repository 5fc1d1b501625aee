"""Measure whether the detector finds slow ranks, nodes, loaders and stores, and nothing else.

Real ranks train and record their steps, three times. The recording with the least other work on the
machine is used. It gives the variation of a rank's work from step to step, with its order and
outliers. The benchmark scales this variation to the requested size. From it the benchmark builds
cases with 4 to 256 ranks. In each case a part becomes slow in the middle of a run. The case counts
as found if the detector names exactly this part within 20 steps. In some cases a rank was also slow
in its first steps, and healthy after these. In other cases the work is uneven, or becomes uneven,
or varies, also with a correlation between consecutive steps. Then no rank is faulty, and each rank
that would be checked counts as an eviction.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from _common import HERE, Conditions, clean_environment, finish, need_torch, number, place, table
from _common import options as common_options

from rekindle.profiling.detector import Detector
from rekindle.profiling.files import lines_of, rank_folders
from rekindle.profiling.findings import Slow
from rekindle.profiling.markers import (
    COMMUNICATION,
    DATA_LOADER,
    DEFAULT,
    FORWARD,
    STEP,
    Encoder,
    Operation,
    Range,
    operation_name,
    ranges,
)
from rekindle.profiling.reading import diagnose, read_task
from rekindle.profiling.steps import Steps, StepTimes

RECORDED_RANKS, RECORDED_STEPS = 2, 400
RECORDINGS = 3  # the one with the smallest drift is used
SIZES = (4, 8, 16, 64, 256)
FACTORS = (1.1, 1.2, 1.3, 1.5, 2.0, 4.0)
NOISES = (0.01, 0.02, 0.04)
SICK = (Slow.RANK, Slow.NODE, Slow.LINK, Slow.LOADING, Slow.SAVING)
TRANSFER_S = 0.3
AGAIN = "slow-rank-again"  # slow at first, then healthy, and slow later
UNEVEN = ("last-stage", "growing-stage", "one-long-rank", "varying")
WELL = ("healthy", *UNEVEN, "lasting")
STEPS, LONG, WITHIN = 75, 150, 20
MEMORY = 0.9  # lasting noise: the share of a step's deviation that comes from the previous step
Truth = tuple[Slow, tuple[int, ...]]


class Case(msgspec.Struct):
    """A case of the benchmark.

    kind: the part that becomes slow, or the reason why none does. onset: the first slow step.
    """

    kind: str
    size: int
    factor: float
    noise: float
    per_node: int
    onset: int
    peers: list[list[int]] = []
    steps: int = STEPS


def main() -> None:
    """Measure, print and write the figures."""
    parser = common_options(__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    need_torch()
    conditions = Conditions()
    chance = np.random.default_rng(args.seed)
    with place() as folder:
        recorded = [_recorded(folder / str(number)) for number in range(RECORDINGS)]
        varies = min(recorded, key=_drift)
        took = _thousand(folder / "thousand", chance, varies)
    counts: dict[str, Counter[str]] = {}
    sent_away: Counter[str] = Counter()  # by kind of case, although no rank was faulty
    began = time.perf_counter()
    cases = list(_cases(chance, 1 if args.quick else 3))
    for case in cases:
        right, wrong, missed, evicted = _judge(case, chance, varies)
        counts.setdefault(case.kind, Counter()).update(
            cases=1, right=right, wrong=wrong, missed=missed
        )
        sent_away[case.kind] += evicted
    rows = [
        (kind, *(str(c[n]) for n in ("cases", "right", "missed", "wrong")))
        for kind, c in counts.items()
    ]
    table(("what", "cases", "found", "missed", "wrongly named"), rows)
    total = sum(counts.values(), Counter())
    print(f"records of 1,000 ranks, {STEPS} steps each: read and judged in {number(took)} s")
    result: dict[str, Any] = {
        "cases": len(cases),
        "precision": round(total["right"] / max(1, total["right"] + total["wrong"]), 4),
        "recall": round(total["right"] / max(1, total["right"] + total["missed"]), 4),
        "imbalance_evictions": sum(sent_away[kind] for kind in UNEVEN),
        "noise_evictions": sum(sent_away[kind] for kind in WELL if kind not in UNEVEN),
        "thousand_ranks_s": round(took, 2),
        # For each recording; about 0.3 if steps vary independently, as on an idle machine.
        "drift": [round(_drift(each), 2) for each in recorded],
        "seconds": round(time.perf_counter() - began, 1),
    }
    finish(result, conditions, args.json)


def _recorded(folder: Path) -> np.ndarray:
    """Train, and return the variation of the logarithm of each rank's work, one row per rank."""
    gate, home = folder / "go", folder / "home"
    folder.mkdir()
    environment = clean_environment(home) | {"REKINDLE_HOME": str(home)}
    home.mkdir()
    rekindle = [sys.executable, "-m", "rekindle.cli.main"]
    command = [*rekindle, "run", "--job-id", "recorded", "--nproc-per-node", str(RECORDED_RANKS)]
    command += [str(HERE / "_rank_recorded.py"), str(gate), str(RECORDED_STEPS)]
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            _switch_on(
                [*rekindle, "profile", "recorded", "on", "--kinds", "communication"], environment
            )
            gate.touch()
            job.wait(120)
        finally:
            job.terminate()
            job.wait(60)
    (task,) = (home / "jobs" / "recorded" / "profiling").iterdir()
    rows = []
    for rank_folder in rank_folders(task).values():
        steps = list(Steps().read(ranges(lines_of(rank_folder))))[10:]
        rows.append(np.log([max(each.compute, 1e-6) for each in steps]))
    length = min(map(len, rows))
    found = np.array([row[:length] - np.median(row[:length]) for row in rows])
    return found / (1.4826 * np.median(np.abs(found)))


def _drift(varies: np.ndarray) -> float:
    """Return how far pieces of a recording differ, in units of the variation of its steps.

    A machine with other work is slow during that work, and the detector would correctly report it.
    """
    pieces = np.array_split(varies, varies.shape[1] // WITHIN, axis=1)
    return float(np.std([np.median(piece, axis=1) for piece in pieces], axis=0).max())


def _switch_on(command: list[str], environment: dict[str, str]) -> None:
    """Run the command repeatedly until the job answers."""
    deadline = time.monotonic() + 60
    while subprocess.run(command, env=environment, capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise SystemExit("the job that is to be recorded does not answer")
        time.sleep(0.2)


def _cases(chance: np.random.Generator, repeats: int) -> Iterator[Case]:
    for _ in range(repeats):
        for size in SIZES:
            per_node = 4 if size < 64 else 8
            for noise in NOISES:
                for kind in SICK:
                    for factor in FACTORS:
                        if kind is Slow.NODE and size <= per_node:
                            continue
                        onset = int(chance.integers(30, 45))
                        # A healthy store may take twice as long for some time, and transfers over a
                        # network vary.
                        more = 1.5 if kind is Slow.SAVING and factor <= 2.0 else 0.0
                        more += 0.3 if kind is Slow.LINK else 0.0
                        yield Case(kind.value, size, factor + more, noise, per_node, onset)
                for factor in FACTORS:
                    onset = int(chance.integers(100, LONG - WITHIN - 5))
                    yield Case(AGAIN, size, factor, noise, per_node, onset, steps=LONG)
                for kind in WELL:
                    for factor in (1.2, 2.0):
                        peers, onset = [], 0
                        if kind.endswith("-stage"):
                            quarter = size // 4
                            peers = [list(range(i * quarter, (i + 1) * quarter)) for i in range(4)]
                        if kind == "growing-stage":
                            onset = int(chance.integers(30, 45))
                        steps = LONG if kind == "lasting" else STEPS
                        yield Case(kind, size, factor, noise, per_node, onset, peers, steps)


def _steps(
    case: Case, chance: np.random.Generator, varies: np.ndarray
) -> tuple[list[dict[int, StepTimes]], Truth | None]:
    """Return the times of each rank in each step, and the slow part that the detector must find."""
    noise = _noise(case, chance, varies)
    # A longer batch is usually longer for all ranks, if sequences are packed.
    work = np.exp(case.noise * noise) * chance.lognormal(0, 0.2, case.steps)[:, None]
    loading = np.full((case.steps, case.size), 0.01) * np.exp(case.noise * np.abs(noise))
    saving = np.zeros((case.steps, case.size))
    saving[::5] = 0.2 * np.exp(case.noise * np.abs(noise[::5]))
    groups = _groups(case)
    transfer = np.full((case.steps, len(groups)), TRANSFER_S)
    transfer *= np.exp(case.noise * noise[:, chance.integers(0, case.size, len(groups))])
    truth = _afflict(case, chance, work, loading, saving)
    if case.kind == Slow.LINK:
        slow = int(chance.integers(0, len(groups)))
        transfer[case.onset :, slow] *= case.factor
        truth = Slow.LINK, tuple(groups[slow])
    own = work + loading
    total = own.max(axis=1) + transfer.max(axis=1)
    # A rank that arrives early waits for the last rank of its group.
    waits = np.zeros((case.steps, case.size))
    for column, group in enumerate(groups):
        last = own[:, group].max(axis=1, keepdims=True)
        waits[:, group] = transfer[:, [column]] + last - own[:, group]
    member = {rank: n for n, group in enumerate(groups) for rank in group}
    steps = [
        {
            rank: StepTimes(
                step=step,
                start=0,
                seconds=float(total[step]),
                own=float(work[step, rank] + loading[step, rank]),
                loading=float(loading[step, rank]),
                saving=float(saving[step, rank]),
                links=((f"group {member[rank]}", (float(waits[step, rank]),)),),
            )
            for rank in range(case.size)
        }
        for step in range(case.steps)
    ]
    return steps, truth


def _noise(case: Case, chance: np.random.Generator, varies: np.ndarray) -> np.ndarray:
    """Return the deviation of each rank's work in each step: from a recording, or generated."""
    if case.kind == "lasting":
        new = chance.standard_normal((case.steps, case.size))
        for step in range(1, case.steps):
            new[step] = MEMORY * new[step - 1] + (1 - MEMORY**2) ** 0.5 * new[step]
        return new
    rows = chance.integers(0, len(varies), case.size)
    starts = chance.integers(0, varies.shape[1] - case.steps, case.size)
    return np.array([varies[r, s : s + case.steps] for r, s in zip(rows, starts, strict=True)]).T


def _groups(case: Case) -> list[list[int]]:
    """Return the groups for collectives: on each node the ranks with the same local number."""
    count = case.per_node if case.size > case.per_node else 1
    return [list(range(first, case.size, count)) for first in range(count)]


def _afflict(
    case: Case,
    chance: np.random.Generator,
    work: np.ndarray,
    loading: np.ndarray,
    saving: np.ndarray,
) -> Truth | None:
    rank = int(chance.integers(0, case.size))
    match case.kind:
        case Slow.RANK:
            work[case.onset :, rank] *= case.factor
        case _ if case.kind == AGAIN:
            work[: int(chance.integers(15, 31)), rank] *= case.factor
            work[case.onset :, rank] *= case.factor
            return Slow.RANK, (rank,)
        case Slow.NODE:
            first = rank // case.per_node * case.per_node
            work[case.onset :, first : first + case.per_node] *= case.factor
            return Slow.NODE, tuple(range(first, first + case.per_node))
        case Slow.LOADING:
            loading[case.onset :, rank] += case.factor - 1
        case Slow.SAVING:
            saving[case.onset :, rank] *= case.factor
        case "last-stage" | "growing-stage":
            work[case.onset :, -case.size // 4 :] *= case.factor
            return None
        case "one-long-rank":
            work[:, rank] *= case.factor
            return None
        case "varying":
            work *= np.exp(chance.normal(0, 0.1 * case.factor, work.shape))
            return None
        case _:
            return None
    return Slow(case.kind), (rank,)


def _judge(
    case: Case, chance: np.random.Generator, varies: np.ndarray
) -> tuple[int, int, int, int]:
    """Return the numbers of correct, wrong and missed findings, and of wrong evictions."""
    steps, truth = _steps(case, chance, varies)
    detector = Detector(case.peers, per_node=case.per_node)
    right = wrong = evicted = 0
    for step, times in enumerate(steps):
        for finding in detector.add(step, times):
            if finding.kind is Slow.UNEVEN:
                continue
            said = (finding.kind, finding.ranks)
            if said == truth and case.onset <= step <= case.onset + WITHIN:
                right = 1
            elif truth is None or not _is_part(said, truth):
                wrong += 1
                evicted += truth is None and finding.may_be_sick
    return right, wrong, int(truth is not None and not right), evicted


def _is_part(said: Truth, truth: Truth) -> bool:
    """Return whether ranks are a part of the truth: a node's ranks are named before the node is."""
    return set(said[1]) <= set(truth[1]) and {said[0], truth[0]} <= {truth[0], Slow.RANK}


def _thousand(folder: Path, chance: np.random.Generator, varies: np.ndarray) -> float:
    """Write the records of 1,000 ranks, and return the seconds to read and judge them."""
    case = Case(Slow.RANK.value, 1000, 1.5, 0.02, 8, 40)
    steps, truth = _steps(case, chance, varies)
    name = operation_name(Operation("0", "1000000", "float32", "all_reduce", "default_group"))
    for rank in range(case.size):
        encoder, lines, now = Encoder(rank, 0), [], 0
        for step, times in enumerate(steps):
            mine = times[rank]
            loaded, done = (now + int(each * 1e9) for each in (mine.loading, mine.own))
            end = now + int(mine.seconds * 1e9)
            for made in (
                Range(DATA_LOADER, DEFAULT, now, loaded),
                Range(FORWARD, DEFAULT, loaded, (loaded + done) // 2),
                Range(name, COMMUNICATION, done, end),
                Range(f"{STEP} {step}", DEFAULT, now, end),
            ):
                lines.append(encoder.lines(made, 1))
            now = end
        (folder / str(rank)).mkdir(parents=True)
        (folder / str(rank) / "1").write_bytes(b"".join(lines))
    began = time.perf_counter()
    found, _ = diagnose(read_task(folder), per_node=case.per_node)
    took = time.perf_counter() - began
    assert truth in [(each.kind, each.ranks) for each in found], found
    return took


if __name__ == "__main__":
    main()
