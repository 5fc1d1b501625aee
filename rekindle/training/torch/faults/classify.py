"""Find the exceptions of a step that report a fault of the system and not a script's error."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from rekindle.errors import SessionError, StaleError
from rekindle.rank.member import chain_of
from rekindle.recovery.faults.fault import FaultKind

# Texts of RuntimeErrors. Each is a phrase of the library that raises it, so that a script's own
# text does not match. Ascend: the texts of torch-npu 2.14, which MindIO TFT also uses
# (`tft_exception_handler`), and the codes of HCCL (EI0006). NVIDIA: torch's text for
# cudaErrorECCUncorrectable. Gloo names its source file and line; NCCL and HCCL name themselves.
_TEXTS = {
    FaultKind.DEVICE_MEMORY: (
        r"UCE ERROR|HBM MULTI BIT ECC|SUSPECT MEM ERROR|uncorrectable ECC error",
    ),
    FaultKind.LINK: (
        r"HCCL OP RETRY FAILED|SUSPECT REMOTE ERROR|(?:UB|HCCS) LINK ERROR|FORCE STOP",
        # Without errors that a script causes: different sizes, or a missing interface.
        r"gloo/[\w/]+\.(?:cc|h):\d+\](?! op\.preamble| ifa != )",
        r"Gloo connectFullMesh failed|failed to pass monitoredBarrier",
        r"NCCL error|NCCL communicator was aborted|collective operation timeout",
        r"HCCL error in|HCCL function error|call hccl api failed|Hccl\w+, error code is",
        # CANN: time-outs of notify wait, sockets and RDMA; its other codes are about arguments.
        r"EI00(?:02|06|12|13)\b|operator name is Hccl\w+",
        r"timed out in blocking wait",
    ),
}
_PATTERNS = {
    kind: re.compile("|".join(rf"\b(?:{text})" for text in texts), re.IGNORECASE)
    for kind, texts in _TEXTS.items()
}
_RAISERS = ("torch", "torch_npu")  # packages whose subclasses of RuntimeError also count


def kind_of(error: BaseException, transient: tuple[type[Exception], ...] = ()) -> FaultKind | None:
    """Return the kind of fault that `error` reports; None: it is the script's own error.

    The type decides first. Text counts only in RuntimeErrors, and not in a script's subclasses of
    it. A system error inside a script's own error also counts.

    transient: exceptions after which the script wants to repeat the step. An exception inside a
    script's own error does not count as one.
    """
    ours = isinstance(error, SessionError)  # it reports an error of the script
    found = set() if ours else {_kind_of_one(each) for each in chain_of(error)}
    for kind in (FaultKind.DEVICE_MEMORY, FaultKind.LINK):
        if kind in found:
            return kind
    return FaultKind.TRANSIENT if isinstance(error, transient) else None


def check_use(error: BaseException) -> None:
    """Raises SessionError: the script gives one GPU to two ranks, which no repetition changes."""
    if "Duplicate GPU detected" in str(error):  # NCCL's text
        raise SessionError(
            "two ranks use the same GPU, and NCCL allows one rank per GPU: call "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the model is made, and '
            'start one rank per GPU (--nproc-per-node gpu), or use Session(backend="gloo")'
        ) from error


def may_come_from_peers(error: BaseException) -> bool:
    """Return whether an unknown error on a device may be the first sign of a peer's failure.

    A lack of device memory never is.
    """
    return isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)


def _kind_of_one(error: BaseException) -> FaultKind | None:
    package = type(error).__module__.partition(".")[0]
    if type(error) is RuntimeError or (isinstance(error, RuntimeError) and package in _RAISERS):
        for kind, pattern in _PATTERNS.items():
            if pattern.search(str(error)):
                return kind
    return FaultKind.LINK if isinstance(error, (dist.DistError, StaleError)) else None
