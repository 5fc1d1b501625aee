"""Each step has random streams of its own, as a pure function of (seed, rank, step).

So a rank's randomness is known even when its process and its node are gone: a replacement draws in
step n what the dead rank would have drawn, and a step that is done again draws the same.
"""

from __future__ import annotations

import random
import sys

import torch

_MASK = (1 << 64) - 1


def stream_seed(seed: int, rank: int, step: int) -> int:
    """Mix the three numbers to 64 bits (splitmix64's finalizer after each)."""
    mixed = 0
    for part in (seed, rank, step):
        mixed = _scramble((mixed ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
    return mixed


def _scramble(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def begin_step(seed: int, rank: int, step: int) -> None:
    """Seed torch (all devices), random and, if the script uses it, numpy for one step."""
    mixed = stream_seed(seed, rank, step)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)
    # Set by torch-npu. Where it is not, asking torch for it costs more than all seeding of torch.
    npu = vars(torch).get("npu")
    if npu is not None and npu.is_initialized():
        npu.manual_seed(mixed)
    random.seed(mixed)
    numpy_random = sys.modules.get("numpy.random")  # `import numpy` alone does not load it
    if numpy_random is not None:
        numpy_random.seed(mixed & 0xFFFFFFFF)
