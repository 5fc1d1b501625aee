"""Seeded random walks of the coordinator's state machine, with a digest of all commands.

A walk builds a random job of simulated agents and ranks. Then it takes random moves: the next
action of an agent or a rank, a fault, or a message at any moment. It ends when the job has ended.
The same seed gives the same commands as long as the state machine makes the same decisions.
Walks with a seed of at least UNCHECKED check nodes: new nodes before they join, and slow nodes
while ranks wait.

Run as a program, it prints how often each message arrived in each phase. With a file as argument
it also writes the digests of all seeds to that file:

    PYTHONPATH=tests/support python -m jobs.walks [tests/unit/coordinator/machine/digests.txt]
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from jobs.checked_walk import CheckedWalk
from jobs.random_walk import Pairs, RandomWalk
from rekindle.coordinator.machine.job_state import Phase

UNCHECKED = 10_000  # walks without node checks
SEEDS = 12_000


def walk(seed: int, pairs: Pairs | None = None) -> str:
    """Run one walk and return its digest.

    `pairs`: counts message types by the phase in which they arrived.
    """
    kind = RandomWalk if seed < UNCHECKED else CheckedWalk
    return kind(seed, pairs if pairs is not None else Counter()).run()


def table(pairs: Pairs) -> str:
    """Return a text with the number of each message type, timer or request by phase."""
    phases = [phase.value for phase in Phase]
    rows = [f"{'':20}" + "".join(f"{phase:>12}" for phase in phases)]
    for name in sorted({name for name, _ in pairs}):
        counts = "".join(f"{pairs[name, phase] or '':>12}" for phase in phases)
        rows.append(f"{name:20}{counts}")
    return "\n".join([*rows, f"{len(pairs)} pairs"])


def main() -> None:
    pairs: Pairs = Counter()
    digests = [walk(seed, pairs) for seed in range(SEEDS)]
    for file in sys.argv[1:2]:
        Path(file).write_text("\n".join(digests) + "\n")
    sys.stdout.write(table(pairs) + "\n")


if __name__ == "__main__":
    main()
