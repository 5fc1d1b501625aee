"""What an exception inside a step says: which of them do not mean that the script is wrong."""

from __future__ import annotations

import re

import torch.distributed as dist

from rekindle.errors import StaleError
from rekindle.recovery.fault import Kind

# Texts of RuntimeErrors. Ascend: those that torch-npu 2.14 raises, and that MindIO TFT looks for
# (`tft_exception_handler`); NVIDIA: torch's words for cudaErrorECCUncorrectable and for a memory
# fault that was contained. Links: gloo names its source files, NCCL and HCCL themselves.
_TEXTS = (
    (
        Kind.DEVICE_MEMORY,
        r"UCE ERROR|HBM MULTI BIT ECC|SUSPECT MEM ERROR|uncorrectable ECC error",
    ),
    (
        Kind.LINK,
        r"HCCL OP RETRY FAILED|SUSPECT REMOTE ERROR|(UB|HCCS) LINK ERROR|FORCE STOP"
        r"|gloo|nccl|hccl|ProcessGroup",
    ),
)
_PATTERNS = tuple((kind, re.compile(text, re.IGNORECASE)) for kind, text in _TEXTS)


def kind_of(error: BaseException, transient: tuple[type[Exception], ...] = ()) -> Kind | None:
    """What kind of fault `error` tells of; None: it is the script's own.

    transient: exceptions that pass, as the script says. Texts are looked for in RuntimeErrors only,
    which is what torch raises.
    """
    if isinstance(error, RuntimeError):
        for kind, pattern in _PATTERNS:
            if pattern.search(str(error)):
                return kind
    if isinstance(error, (dist.DistError, StaleError)):
        return Kind.LINK
    return Kind.TRANSIENT if isinstance(error, transient) else None
