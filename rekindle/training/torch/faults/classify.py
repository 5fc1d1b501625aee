"""What an exception inside a step says: which of them do not mean that the script is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch.distributed as dist

from rekindle.errors import SessionError, StaleError
from rekindle.recovery.faults.fault import Kind

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


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it came from: a script may wrap an error in one of its own."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def kind_of(error: BaseException, transient: tuple[type[Exception], ...] = ()) -> Kind | None:
    """What kind of fault `error` tells of; None: it is the script's own.

    transient: exceptions that pass, as the script says; one that it has wrapped does not count: it
    has decided otherwise. Texts are looked for in RuntimeErrors only, which is what torch raises.
    """
    ours = isinstance(error, SessionError)  # it says itself what is wrong
    told = set() if ours else {_told_by(each) for each in chain_of(error)}
    for kind in (Kind.DEVICE_MEMORY, Kind.LINK):
        if kind in told:
            return kind
    return Kind.TRANSIENT if isinstance(error, transient) else None


def _told_by(error: BaseException) -> Kind | None:
    if isinstance(error, RuntimeError):
        for kind, pattern in _PATTERNS:
            if pattern.search(str(error)):
                return kind
    return Kind.LINK if isinstance(error, (dist.DistError, StaleError)) else None
