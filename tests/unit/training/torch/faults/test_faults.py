"""The kind of fault for an exception inside a step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rekindle.errors import SessionError, StaleError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.torch.faults.repairs import check_use, kind_of, may_come_from_peers

GLOO = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


class ScriptError(RuntimeError):
    """An error type of a script."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(GLOO), FaultKind.LINK),
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error"),
            FaultKind.LINK,
        ),
        (RuntimeError("Gloo connectFullMesh failed with [pair.cc:144] no error"), FaultKind.LINK),
        (
            RuntimeError("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 300 ms"),
            FaultKind.LINK,
        ),
        (RuntimeError("NCCL error in: unhandled system error"), FaultKind.LINK),
        (RuntimeError("NCCL communicator was aborted on rank 2."), FaultKind.LINK),
        (RuntimeError("[Rank 3] Watchdog caught collective operation timeout: "), FaultKind.LINK),
        (RuntimeError("[ERROR] HCCL error in: ProcessGroupHCCL.cpp:64"), FaultKind.LINK),
        (RuntimeError("create:compiler_depend.ts:89 HCCL function error: f()"), FaultKind.LINK),
        (RuntimeError("OPS function error: HcclAllreduce, error code is 6"), FaultKind.LINK),
        (RuntimeError("EI0006: [PID: 1] Getting socket times out."), FaultKind.LINK),
        (RuntimeError("Communication_Error_Get_Socket(EI0006): Getting socket"), FaultKind.LINK),
        (RuntimeError("the current working operator name is HcclAllGather."), FaultKind.LINK),
        (RuntimeError("EI0003: the arguments of ranks differ"), None),
        (RuntimeError("[enforce fail at gloo/tcp/pair.cc:446] op.preamble.length <= 8"), None),
        (RuntimeError("[enforce fail at gloo/tcp/device.cc:84] ifa != nullptr. eth7"), None),
        (RuntimeError("ERR02200 DIST call hccl api failed."), FaultKind.LINK),
        (RuntimeError("HCCL OP RETRY FAILED. error code 507057"), FaultKind.LINK),
        (RuntimeError("SUSPECT REMOTE ERROR"), FaultKind.LINK),
        (RuntimeError("HCCS LINK ERROR"), FaultKind.LINK),
        (RuntimeError("UB LINK ERROR"), FaultKind.LINK),
        (RuntimeError("FORCE STOP"), FaultKind.LINK),
        (dist.DistBackendError("timed out"), FaultKind.LINK),
        (dist.DistBackendError("HBM MULTI BIT ECC ERROR.time is 17"), FaultKind.DEVICE_MEMORY),
        (StaleError("the generation ended"), FaultKind.LINK),
        (RuntimeError("UCE ERROR"), FaultKind.DEVICE_MEMORY),
        (RuntimeError("HBM MULTI BIT ECC ERROR.time us= 17."), FaultKind.DEVICE_MEMORY),
        (RuntimeError("SUSPECT MEM ERROR"), FaultKind.DEVICE_MEMORY),
        (
            RuntimeError("CUDA error: uncorrectable ECC error encountered"),
            FaultKind.DEVICE_MEMORY,
        ),
        (
            RuntimeError("UCE ERROR; HCCL error in: x"),
            FaultKind.DEVICE_MEMORY,
        ),  # the cause comes first
        (ScriptError("NCCL error in: x"), None),
        (RuntimeError("igloo.csv row 17 has no label"), None),
        (RuntimeError("gloo/train.csv:17 has no label"), None),
        (RuntimeError("set backend to gloo, nccl or hccl"), None),
        (RuntimeError("the sample names no ProcessGroup"), None),
        (RuntimeError("Distributed package doesn't have NCCL built in"), None),
        (RuntimeError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"), None),
        (RuntimeError("reinforce stopped"), None),
        (RuntimeError("force stopped by the early-stopping callback"), None),
        (RuntimeError("force stop"), None),
        (RuntimeError("NCCL errors.csv row 17"), None),
        (RuntimeError("cannot produce error table"), None),
        (ConnectionResetError("peer"), FaultKind.TRANSIENT),
        (TimeoutError("gloo"), FaultKind.TRANSIENT),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("UCE ERROR"), None),
        (KeyboardInterrupt(), None),
    ],
    ids=repr,
)
def test_kind_of_an_exception(error: BaseException, kind: FaultKind | None) -> None:
    """Only the text of a RuntimeError shows a fault; the script lists its transient exceptions."""
    assert kind_of(error, (ConnectionError, TimeoutError)) is kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [(GLOO, FaultKind.LINK), ("UCE ERROR", FaultKind.DEVICE_MEMORY), ("?", FaultKind.TRANSIENT)],
)
def test_what_is_known_goes_before_what_the_script_says(text: str, kind: FaultKind) -> None:
    """If a script lists all exceptions as transient, link and memory faults keep their kind."""
    assert kind_of(RuntimeError(text), (Exception,)) is kind


def raised_from(origin: BaseException, *, hidden: bool = False) -> BaseException:
    """Return the script's own error, which it raises because of `origin`.

    hidden: it raises it from None.
    """
    try:
        try:
            raise origin
        except type(origin) as error:
            if hidden:
                raise ValueError("no luck") from None
            raise ValueError("no luck") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    ("origin", "kind"),
    [
        (RuntimeError(GLOO), FaultKind.LINK),
        (dist.DistBackendError("timed out"), FaultKind.LINK),
        (RuntimeError("UCE ERROR"), FaultKind.DEVICE_MEMORY),
        (ConnectionResetError("peer"), None),
        (KeyError("x"), None),
    ],
    ids=repr,
)
def test_errors_that_the_script_has_wrapped(
    origin: Exception, kind: FaultKind | None, hidden: bool
) -> None:
    """A wrapped link or memory fault keeps its kind; a wrapped transient exception does not."""
    assert kind_of(raised_from(origin, hidden=hidden), (ConnectionError,)) is kind


def test_the_graver_error_of_a_chain_counts() -> None:
    """In a chain of errors, damaged memory counts more than a link, in either order."""
    for first, last in ((GLOO, "UCE ERROR"), ("UCE ERROR", GLOO)):
        error = RuntimeError(last)
        error.__cause__ = RuntimeError(first)
        assert kind_of(error) is FaultKind.DEVICE_MEMORY


def test_what_a_session_says_of_a_script_is_no_fault() -> None:
    """A SessionError is not a fault, even if its cause has such a text.

    An example is torch's error when DDP refuses a model.
    """
    error = SessionError("DistributedDataParallel refuses the model")
    error.__cause__ = RuntimeError(GLOO)
    assert kind_of(error) is None


def test_a_chain_that_bites_its_own_tail() -> None:
    """A chain of errors with a cycle, which a script can create, does not cause an endless loop."""
    error, other = ValueError("a"), ValueError("b")
    error.__cause__, other.__cause__ = other, error
    assert kind_of(error) is None


# Recorded with torch 2.11 on an H100.
DUPLICATE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with "
    "NCCL_DEBUG=WARN for details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects "
    "invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
)


def test_two_ranks_on_one_gpu_are_an_error_of_the_script() -> None:
    """Two ranks on one GPU are an error of the script, whose text names the remedy.

    A repetition would fail in the same way.
    """
    with pytest.raises(SessionError, match=r"two ranks use the same GPU.*--nproc-per-node gpu"):
        check_use(dist.DistBackendError(DUPLICATE))
    check_use(dist.DistBackendError("NCCL error in: unhandled system error"))


def test_a_lack_of_device_memory_is_no_sign_of_a_peers_failure() -> None:
    """If device memory is short, the rank ends at once: the error does not come from a peer.

    For other errors of a device it waits two seconds for news of a peer.
    """
    assert not may_come_from_peers(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert may_come_from_peers(RuntimeError("CUDA error: an unknown text of a new driver"))
    assert not may_come_from_peers(ValueError("a planted error"))
