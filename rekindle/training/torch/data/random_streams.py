"""Each step has random streams of its own, as a pure function of (seed, rank, step).

So a rank's randomness is known even when its process and its node are gone: a replacement draws in
step n what the dead rank would have drawn, and a step that is done again draws the same.
"""

from __future__ import annotations

import functools
import random

import numpy
import torch

_MASK = (1 << 64) - 1

# Every step seeds, with code that the step before has pushed out of all caches: what counts is how
# much code runs. The functions random.seed and numpy.random.seed take about as long again as what
# they wrap, so the generators behind them are seeded directly.
_python = random._inst
_seed_python = super(random.Random, _python).seed
_seed_numpy = numpy.random.mtrand._rand.seed


def stream_seed(seed: int, rank: int, step: int) -> int:
    """Mix the three numbers to 64 bits (splitmix64's finalizer after each)."""
    return _mix(_rank_seed(seed, rank), step)


@functools.lru_cache
def _rank_seed(seed: int, rank: int) -> int:
    return _mix(_mix(0, seed), rank)


def _mix(word: int, part: int) -> int:
    word = (word ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def begin_step(seed: int, rank: int, step: int) -> None:
    """Seed torch (all devices), random and numpy for one step."""
    mixed = stream_seed(seed, rank, step)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)
    # Set by torch-npu. Where it is not, asking torch for it costs more than all seeding of torch.
    npu = vars(torch).get("npu")
    if npu is not None and npu.is_initialized():
        npu.manual_seed(mixed)
    _seed_python(mixed)
    _python.gauss_next = None  # type: ignore[attr-defined]  # left out of typeshed
    try:
        _seed_numpy(mixed & 0xFFFFFFFF)
    except TypeError:  # the script chose another bit generator: numpy.random.set_bit_generator
        numpy.random.seed(mixed & 0xFFFFFFFF)
