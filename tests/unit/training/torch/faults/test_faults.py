"""The kind of fault for an exception inside a step."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.pool import RemoteTraceback
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from rekindle.errors import SessionError, StaleError
from rekindle.rank.error_origin import is_of_script, is_raised_by_script, is_text_of_script
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
        (
            RuntimeError(
                "[enforce fail at ../third_party/gloo/gloo/alltoallv.cc:138] "
                "inLengthPerRank[myRank] == outLengthPerRank[myRank]. 8 vs 12"
            ),
            None,
        ),
        (
            RuntimeError(
                "[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:94] rv != -1. "
                "getpeername: Transport endpoint is not connected"
            ),
            FaultKind.LINK,
        ),
        (RuntimeError("[/gloo/rendezvous/hash_store.cc:54] Wait timeout for key"), FaultKind.LINK),
        (RuntimeError("[gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms"), FaultKind.LINK),
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


def library_raises(error: BaseException) -> None:
    """Raise the error in the standard library."""
    future = Future[None]()
    future.set_exception(error)
    future.result()


def caught(function: Callable[..., object], *arguments: object) -> BaseException:
    """Return the error that the function raises."""
    try:
        function(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def handle(origin: BaseException, *, how: Callable[[BaseException], None]) -> None:
    """Run a script's handling of an error that a library raises."""
    try:
        library_raises(origin)
    except BaseException as error:
        how(error)


def names_the_cause(error: BaseException) -> None:
    raise ValueError("no luck") from error


def hides_it_in_its_own_type(_: BaseException) -> None:
    raise ScriptError("no luck") from None


def quotes(error: BaseException) -> None:
    raise RuntimeError(f"training failed: {error}") from error


WRAPS = [names_the_cause, hides_it_in_its_own_type]


@pytest.mark.parametrize("how", WRAPS)
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
    origin: Exception, kind: FaultKind | None, how: Callable[[BaseException], None]
) -> None:
    """A wrapped link or memory fault keeps its kind; a wrapped transient exception does not."""
    error = caught(functools.partial(handle, how=how), origin)
    assert kind_of(error, (ConnectionError,)) is kind


def test_a_mistake_in_the_handling_of_a_link_fault() -> None:
    """A KeyError that a script raises while it handles a link fault is an error of the script."""

    def forgets(_: BaseException) -> None:
        raise KeyError("no label map was given; pass --labels")

    def looks_up(_: BaseException) -> None:
        {}["labels"]

    for how in (forgets, looks_up):
        error = caught(functools.partial(handle, how=how), dist.DistStoreError("wait timeout"))
        assert error.__context__ is not None
        assert kind_of(error) is None
        assert may_come_from_peers(error, accelerator=False)


def fails_in_a_worker(text: str, _: object) -> None:
    raise RuntimeError(text)


@pytest.mark.process
@pytest.mark.parametrize("text", [GLOO, "UCE ERROR", "NCCL error in row 3"])
def test_an_error_of_a_data_loaders_worker_is_of_the_script(text: str) -> None:
    """torch raises the error of a worker again in the rank, with its text and its traceback."""
    loader = DataLoader([0], collate_fn=functools.partial(fails_in_a_worker, text), num_workers=1)
    error = caught(next, iter(loader))
    assert text in str(error)
    assert kind_of(error) is None


@pytest.mark.parametrize(
    "text",
    [
        GLOO,
        "UCE ERROR",
        "NCCL error in config.yaml line 3: unknown key nccl_timeout",
        "HCCL error in table 3",
        "row EI0002: bad label",
        "the database query timed out in blocking wait",
        "uncorrectable ECC error in zip archive",
    ],
)
def test_text_counts_only_if_a_library_raised_the_error(text: str) -> None:
    """A `raise` of the script is the script's error, also with the text of a library.

    Libraries raise from C++, without a `raise` statement, or in their own files.
    """

    def script_raises(error: BaseException) -> None:
        raise error

    assert kind_of(caught(script_raises, RuntimeError(text))) is None
    assert kind_of(caught(library_raises, RuntimeError(text))) is not None


def test_a_real_error_of_torch_is_of_a_library() -> None:
    """torch's C++ raises without a `raise` statement, so the text of its errors counts."""
    error = caught(dist.TCPStore, "127.0.0.1", 1, 1, False, timedelta(milliseconds=1))
    assert not is_raised_by_script(error)
    product = caught(torch.mm, torch.zeros(2, 3), torch.zeros(2, 3))
    assert type(product) is RuntimeError
    assert not is_raised_by_script(product)


def package_in(folder: Path, name: str) -> ModuleType:
    """Return a package whose `fail` raises its argument. Later tests cannot import it."""
    path = folder / name / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text("def fail(error):\n    raise error\n")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_error_of_a_package_that_is_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code in site-packages is a library, but the package of `-m` is the script.

    A framework is a library in any folder.
    """
    trainer = package_in(tmp_path / "site-packages", "trainer")
    framework = package_in(tmp_path, "torch_npu")
    assert not is_raised_by_script(caught(trainer.fail, RuntimeError(GLOO)))
    assert not is_raised_by_script(caught(framework.fail, RuntimeError(GLOO)))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", trainer.__spec__)
    assert is_raised_by_script(caught(trainer.fail, RuntimeError(GLOO)))


def test_compiled_code_has_no_instructions() -> None:
    """A library raises the errors of compiled code, for example of numpy's random numbers."""
    error = caught(np.random.RandomState(1).choice, 3, 5, False)
    assert isinstance(error, ValueError)
    assert not is_of_script(error)


def test_an_error_that_wraps_a_system_error_is_not_only_of_the_script() -> None:
    """The coordinator judges such an error by its text, which quotes the system error."""
    error = caught(functools.partial(handle, how=quotes), RuntimeError(GLOO))
    assert is_raised_by_script(error)
    assert not is_of_script(error)
    missing = caught(functools.partial(handle, how=quotes), FileNotFoundError("gloo/cats.h"))
    assert is_of_script(missing)


class LabelRuntimeError(RuntimeError):
    """An error of a script."""


class LabelConnectError(Exception):
    """An error of a script about its own server."""


class LabelServerError(ConnectionError):
    """An error of a script, of a type for connections."""


@pytest.mark.parametrize(
    ("error", "of_script"),
    [
        (RuntimeError("Connection refused"), True),
        (Exception("Connection refused"), True),
        (LabelRuntimeError("Connection refused"), True),
        (LabelConnectError("Connection refused"), True),
        (LabelServerError("Connection refused"), False),
        (ConnectionError("Connection refused"), False),
        (OSError(5, "Input/output error"), False),
        (MemoryError("no memory for the samples"), False),
        (dist.DistBackendError("NCCL error in: x.cpp:1"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_a_type_of_the_system_keeps_its_meaning(error: Exception, of_script: bool) -> None:
    """The text of an error that the script raises counts only if the type reports the system."""

    def script_raises(error: Exception) -> None:
        raise error

    assert not is_text_of_script(caught(library_raises, type(error)(*error.args)))
    assert is_text_of_script(caught(script_raises, error)) is of_script


@pytest.mark.parametrize("of_pool", [True, False])
def test_an_error_of_a_worker_process_is_of_the_script(of_pool: bool) -> None:
    """A library raises it again in the rank, so its text looks like that of a library."""
    text = GLOO if of_pool else f"Caught RuntimeError in DataLoader worker process 0.\n{GLOO}"
    error = RuntimeError(text)
    error.__cause__ = RemoteTraceback("the worker's") if of_pool else None
    assert is_text_of_script(caught(library_raises, error))
    assert kind_of(error) is None


def test_the_graver_error_of_a_chain_counts() -> None:
    """In a chain of errors, damaged memory counts more than a link, in either order."""
    for first, last in ((GLOO, "UCE ERROR"), ("UCE ERROR", GLOO)):
        error = RuntimeError(last)
        error.__cause__ = caught(library_raises, RuntimeError(first))
        assert kind_of(error) is FaultKind.DEVICE_MEMORY


def test_a_cause_that_nothing_raised() -> None:
    """A script may create an exception and use it as a cause; no library raised it."""
    error = RuntimeError("bad")
    error.__cause__ = RuntimeError(GLOO)
    assert kind_of(error) is None


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
    on_device = functools.partial(may_come_from_peers, accelerator=True)
    assert not on_device(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert not on_device(RuntimeError("DataLoader worker (pid 31) is killed by signal: Killed. "))
    assert on_device(RuntimeError("CUDA error: an unknown text of a new driver"))
    assert not on_device(ValueError("a planted error"))
    assert not on_device(caught(fails_in_a_worker, "raised by the script", None))
    assert not may_come_from_peers(RuntimeError("mat1 and mat2"), accelerator=False)
