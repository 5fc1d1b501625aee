"""Which exceptions of a step mean that a collective failed, and not that the script is wrong."""

from __future__ import annotations

import re

import torch.distributed as dist

from rekindle.errors import StaleError

# Texts of RuntimeErrors of torch 2.13: gloo names its source files, NCCL and HCCL themselves.
_TEXT = re.compile(r"gloo|nccl|hccl|ProcessGroup", re.IGNORECASE)


def is_collective_failure(error: BaseException) -> bool:
    """Whether `error` was raised by a collective whose peer is gone, or that was severed."""
    if isinstance(error, (dist.DistError, StaleError)):
        return True
    return isinstance(error, RuntimeError) and bool(_TEXT.search(str(error)))
