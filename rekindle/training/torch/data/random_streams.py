"""Give each step its own random streams, as a pure function of (seed, rank, step).

So a rank's random numbers are known even when its process and its node are lost. Its replacement
draws the same numbers in step n as the lost rank, and a repeated step draws the same numbers again.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy
import torch

_MASK = (1 << 64) - 1

# Every step seeds, and the step before has displaced this code from all caches. So the amount of
# code decides the time. The functions random.seed and numpy.random.seed double the time of the
# generators' own functions, so this module seeds the generators directly.
_python = random._inst
_seed_python = super(random.Random, _python).seed
_seed_numpy = numpy.random.mtrand._rand.seed


def stream_seed(seed: int, rank: int, step: int) -> int:
    """Mix the three numbers to 64 bits, with splitmix64's finalizer after each number."""
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
    # torch-npu sets `torch.npu`. Without it, getattr(torch, "npu") takes longer than seeding torch.
    npu = vars(torch).get("npu")
    if npu is not None and npu.is_initialized():
        npu.manual_seed(mixed)
    _seed_python(mixed)
    _python.gauss_next = None  # type: ignore[attr-defined]  # typeshed omits it
    try:
        _seed_numpy(mixed & 0xFFFFFFFF)
    except TypeError:  # the script chose another bit generator: numpy.random.set_bit_generator
        numpy.random.seed(mixed & 0xFFFFFFFF)


def outer_states() -> tuple[Any, ...]:
    """Return the states of torch's CPU generator, `random` and `numpy.random`; see set_outer().

    It is for this process; EpochBatches.states() has a form for the state format.
    """
    raise NotImplementedError


def set_outer(states: tuple[Any, ...]) -> None:
    """Set these generators to states of outer_states()."""
    raise NotImplementedError
