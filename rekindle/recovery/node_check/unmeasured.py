"""Errors that say that nothing was measured, and so nothing about the hardware. Pure.

A device whose memory ranks hold is not sick. The texts are those of the tables of faults
(rekindle/recovery/codes/data/texts.toml), which a job's processes do not read; and those of NCCL
and of HCCL where they cannot have their buffers.
"""

from __future__ import annotations

import re

# What an agent says of a checker that it has seen end so.
KILLED = "killed for want of memory"

_NO_MEMORY = re.compile(
    r"\bout of memory\b|OutOfMemoryError\b|\bMemoryError\b|\bfor want of memory\b"
    r"|C(?:UBLAS|UDNN)_STATUS_ALLOC_FAILED|Failed to CUDA [a-z]{0,8}alloc"
    r"|\bEL0004\b|memory isn't enough|Memory resources are exhausted"
    r"|alloc(?:ate)?(?: [a-z]{1,9}){0,2} memory failed"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|\[Errno 12\]|Cannot allocate memory|bad_alloc"
    r"|shared memory segment.{0,200}No space left on device",
    re.IGNORECASE,
)
_HELD = re.compile(r"CUDA-capable device\(s\) is/are busy or unavailable", re.IGNORECASE)


def lacks_memory(error: str) -> bool:
    """Whether it could not be measured for want of memory, of the device or the host."""
    return bool(_NO_MEMORY.search(error))


def is_held(error: str) -> bool:
    """Whether another process holds the device, and does not share it.

    Where nobody trains that is a fault; ranks of the job that is checked may do so.
    """
    return bool(_HELD.search(error))
