"""Seeded random walks of the coordinator's state machine, with a digest of all commands.

A walk builds a random job of simulated agents and ranks. Then it takes random moves: the next
action of an agent or a rank, a fault, or a message at any moment. It ends when the job has ended.
The same seed gives the same commands as long as the state machine makes the same decisions.
Walks with a seed of at least UNCHECKED check nodes: new nodes before they join, and slow nodes
while ranks wait.

Run as a program, it runs walks on all processors, and prints how often each message arrived in each
phase. With a file as argument it writes the digests that changed to that file. Seeds (`7` or
`100-199`) after the file select walks; without them it runs all:

    PYTHONPATH=tests/support python -m jobs.walks [FILE [SEED ...]]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from jobs.checked_walk import CheckedWalk
from jobs.random_walk import DIGITS, Pairs, RandomWalk
from rekindle.coordinator.machine.job_state import Phase

UNCHECKED = 10_000  # walks without node checks
SEEDS = 12_000
_CHUNK = 50  # walks that a process runs before it asks for more
_SHOWN = 20  # seeds in a line of text


def walk(seed: int, pairs: Pairs | None = None) -> str:
    """Run one walk and return its digest.

    `pairs`: counts message types by the phase in which they arrived.
    """
    kind = RandomWalk if seed < UNCHECKED else CheckedWalk
    return kind(seed, pairs if pairs is not None else Counter()).run()


def walks(seeds: Iterable[int], pairs: Pairs) -> dict[int, str]:
    """Run these walks on all processors, and return their digests by seed. `pairs`: as in walk."""
    found = {}
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        for seed, digest, own in pool.imap_unordered(_counted, seeds, _CHUNK):
            found[seed] = digest
            pairs.update(own)
    return found


def _counted(seed: int) -> tuple[int, str, Pairs]:
    pairs: Pairs = Counter()
    return seed, walk(seed, pairs), pairs


def table(pairs: Pairs) -> str:
    """Return a text with the number of each message type, timer or request by phase."""
    phases = [phase.value for phase in Phase]
    rows = [f"{'':20}" + "".join(f"{phase:>12}" for phase in phases)]
    for name in sorted({name for name, _ in pairs}):
        counts = "".join(f"{pairs[name, phase] or '':>12}" for phase in phases)
        rows.append(f"{name:20}{counts}")
    return "\n".join([*rows, f"{len(pairs)} pairs"])


def seeds_of(text: str) -> range:
    """Return the seeds that an argument names: `7`, or `100-199`.

    Raises ArgumentTypeError: it names none.
    """
    first, _, last = text.partition("-")
    try:
        seeds = range(int(first), int(last or first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds or seeds[-1] >= SEEDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} names no seeds; give a number such as 7 or a range such as 100-199, below "
            f"{SEEDS}"
        )
    return seeds


def update(file: Path, found: dict[int, str]) -> list[int]:
    """Write these digests to the file, one line for each seed; return the seeds that changed."""
    lines = file.read_text().split() if file.exists() else []
    lines += ["-" * DIGITS] * (max(found) + 1 - len(lines))  # seeds that were never run
    changed = sorted(seed for seed, digest in found.items() if lines[seed] != digest)
    for seed in changed:
        lines[seed] = found[seed]
    if changed:
        file.write_text("\n".join(lines) + "\n")
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(prog="jobs.walks")
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="the recorded digests")
    parser.add_argument("seeds", type=seeds_of, nargs="*", metavar="SEED", help="7, or 100-199")
    given = parser.parse_args()
    pairs: Pairs = Counter()
    found = walks(sorted({seed for each in given.seeds for seed in each}) or range(SEEDS), pairs)
    sys.stdout.write(table(pairs) + "\n")
    if given.file is not None:
        changed = update(given.file, found)
        shown = " ".join(map(str, changed[:_SHOWN])) + (" ..." if len(changed) > _SHOWN else "")
        sys.stdout.write(f"{len(changed)} of {len(found)} walks changed: {shown or 'none'}\n")


if __name__ == "__main__":
    main()
