"""The machine gives the same commands as before in random walks (`jobs.walks`).

There are digests of SEEDS walks, the last ones with node checks. `make soak` compares all of them,
other runs the first ones of both kinds.

The digests leave out sentences, so a change of wording keeps them. A change that alters what the
machine decides rewrites the digests, and its commit states the reason. A change of structure alone
keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest
from jobs.walks import SEEDS, UNCHECKED, Pairs, table, walk

from rekindle.protocol import agent as p

RECORDED = Path(__file__).with_name("digests.txt").read_text().split()
RARE = {p.DeviceResetFailed.__name__}  # a reset needs a code that demands it
QUICK = (*range(1_000), *range(UNCHECKED, UNCHECKED + 100))


def differing(seeds: Iterable[int], pairs: Pairs) -> list[int]:
    """Return the seeds whose walks differ from the recorded commands."""
    return [seed for seed in seeds if walk(seed, pairs) != RECORDED[seed]]


def test_commands_are_those_recorded() -> None:
    """The first walks give the recorded commands, and they meet every type of message."""
    pairs: Pairs = Counter()
    assert differing(QUICK, pairs) == []
    met = {name for name, _ in pairs}
    assert {kind.__name__ for kind in get_args(p.FromAgent)} - met <= RARE, table(pairs)


@pytest.mark.soak
def test_commands_of_all_walks_are_those_recorded() -> None:
    """All walks give the recorded commands."""
    assert len(RECORDED) == SEEDS
    pairs: Pairs = Counter()
    assert differing(range(SEEDS), pairs) == []
    print(table(pairs))
