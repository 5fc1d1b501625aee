"""The fault of an exit, and the cause among several faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.faults.classification import fault_of_exit
from rekindle.recovery.faults.fault import ErrorRecord, Exit, Fault, FaultKind, root_cause
from rekindle.recovery.faults.tables.tables import Tables

TABLES = Tables.load()
RUNTIME = (
    FaultKind.PROCESS,
    FaultKind.STUCK,
    FaultKind.RESTORE,
    FaultKind.NODE_LOST,
    FaultKind.LINK,
    FaultKind.TRANSIENT,
    FaultKind.DEVICE_MEMORY,
    FaultKind.DEVICE,
)
SEEN = [
    Fault(kind=kind, message=kind.value)
    for kind in (FaultKind.USER_CODE, *RUNTIME, FaultKind.STORAGE)
]


@pytest.mark.parametrize(
    ("exit_", "error", "kind", "words"),
    [
        (Exit(signal=9), None, FaultKind.PROCESS, "ended by signal 9 (SIGKILL)"),
        (Exit(signal=40), None, FaultKind.PROCESS, "ended by signal 40"),
        (Exit(code=3), None, FaultKind.USER_CODE, "ended with exit status 3"),
        (
            Exit(code=1),
            ErrorRecord(message="KeyError: 1"),
            FaultKind.USER_CODE,
            "raised KeyError: 1",
        ),
        (Exit(signal=6), ErrorRecord(message="Abort: x"), FaultKind.USER_CODE, "raised Abort: x"),
    ],
)
def test_how_an_exit_is_judged(
    exit_: Exit, error: ErrorRecord | None, kind: FaultKind, words: str
) -> None:
    """A signal is a fault of the process. An exit status or an exception is the script's fault."""
    found = fault_of_exit(TABLES, exit_, error, rank=2, node=1, finished=7, at=50.0)
    assert (found.kind, found.rank, found.finished, found.at) == (kind, 2, 7, 50.0)
    assert words in found.message
    assert found.blamed() == "rank 2 on node 1"


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: igloo/transport.csv row 17 has no label",
        "RuntimeError: data/gloo/transport.csv has no header",
        "RuntimeError: Broken pipeline.csv",
        "RuntimeError: enforce stopwords.txt",
        "RuntimeError: force stop of the early-stopping callback",
        "RuntimeError: could not produce error table",
        "RuntimeError: reduce error in my loss",
        "RuntimeError: the column NCCL errors is empty",
        "RuntimeError: step finish without a loss",
        "LabelError: NCCL error is not one of the 12 classes",
        "fleet.LabelError: the text 'GPU is lost' has no class",
        "ConfigError: HCCS LINK ERROR has no handler",
        "FileNotFoundError: [Errno 2] No such file or directory: 'UCE ERROR.csv'",
        "StopIteration: FORCE STOP",
        "Exception: uncorrectable ECC error",
    ],
)
def test_an_error_of_the_script_is_not_a_fault_of_the_system(message: str) -> None:
    """The type decides first. Words of a library count only as whole words in its own types."""
    error = ErrorRecord(message=message, traceback="Traceback: own")
    found = fault_of_exit(TABLES, Exit(code=1), error, rank=0, node=0, finished=1, at=1.0)
    assert found.kind is FaultKind.USER_CODE
    assert found.user_caused
    assert not found.reset_helps
    assert found.traceback == "Traceback: own"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970", FaultKind.LINK),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", FaultKind.LINK),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", FaultKind.LINK),
        ("ConnectError: [Errno 111] Connection refused", FaultKind.LINK),
        ("StepError: step 7: RuntimeError: NCCL error in: NCCLUtils.cpp:94", FaultKind.LINK),
        ("NVMLError_GpuIsLost: GPU is lost", FaultKind.DEVICE),
        (
            "DeferredCudaCallError: CUDA call failed lazily at initialization with error: CUDA "
            "error: uncorrectable ECC error encountered",
            FaultKind.DEVICE_MEMORY,
        ),
        (
            "BackendCompilerFailed: backend='inductor' raised:\nRuntimeError: CUDA error: "
            "uncorrectable ECC error encountered",
            FaultKind.DEVICE_MEMORY,
        ),
        (
            "ProcessRaisedException: -- Process 0 terminated:\nRuntimeError: "
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error",
            FaultKind.LINK,
        ),
        ("RuntimeError: [gloo/transport/tcp/tls/pair.cc:99] SSL_read failed", FaultKind.LINK),
        ("ClientOSError: [Errno 104] Connection reset by peer", FaultKind.LINK),
        ("URLError: <urlopen error [Errno 111] Connection refused>", FaultKind.LINK),
        ("AcceleratorError: CUDA error: uncorrectable ECC error", FaultKind.DEVICE_MEMORY),
        ("RuntimeError: UCE ERROR", FaultKind.DEVICE_MEMORY),
        ("DiskError: mdb_put: No space left on device", FaultKind.STORAGE),
        ("NCCL WARN NET/IB : Got completion with status=12", FaultKind.LINK),
        ("ERR02200 DIST call hccl api failed.", FaultKind.LINK),
    ],
)
def test_an_error_of_the_system_keeps_its_kind(message: str, kind: FaultKind) -> None:
    """A type of the system or a library, alone or quoted, keeps the verdict of its text."""
    error = ErrorRecord(message=message)
    found = fault_of_exit(TABLES, Exit(code=1), error, rank=0, node=0, finished=1, at=1.0)
    assert found.kind is kind


@pytest.mark.parametrize(
    ("message", "text_of_script", "kind"),
    [
        ("RuntimeError: data/gloo/transport/cats.h is missing", True, FaultKind.USER_CODE),
        ("RuntimeError: data/gloo/transport/cats.h is missing", False, FaultKind.LINK),
        ("RuntimeError: row 7: Broken pipe in column state", True, FaultKind.USER_CODE),
        ("RuntimeError: CUDA out of memory", True, FaultKind.USER_CODE),
        ("RuntimeError: Worker process 3 exit with exception", True, FaultKind.USER_CODE),
        ("main.<locals>.LabelConnectError: Connection refused", True, FaultKind.USER_CODE),
        ("httpx.ConnectError: [Errno 111] Connection refused", False, FaultKind.LINK),
        ("xla.XlaRuntimeError: Connection reset by peer", False, FaultKind.LINK),
    ],
)
def test_a_text_of_the_script_is_no_fault_of_the_system(
    message: str, text_of_script: bool, kind: FaultKind
) -> None:
    """The origin of an error decides whether its text counts."""
    error = ErrorRecord(message=message, text_of_script=text_of_script)
    found = fault_of_exit(TABLES, Exit(code=1), error, rank=0, node=0, finished=1, at=1.0)
    assert found.kind is kind


def test_an_own_entry_counts_for_every_type(tmp_path: Path) -> None:
    """The user's own entry decides about an exception of the user's own type."""
    own = tmp_path / "own.toml"
    own.write_text('[[text]]\npatterns = ["mount lost"]\nkind = "link"\nsays = "the mount is gone"')
    error = ErrorRecord(message="loader.StorageGone: mount lost")
    place = {"rank": 0, "node": 0, "finished": 1, "at": 1.0}
    raised = ErrorRecord(message="RuntimeError: mount lost", text_of_script=True)
    assert fault_of_exit(Tables.load(own), Exit(code=1), raised, **place).kind is FaultKind.LINK
    with_entry = fault_of_exit(Tables.load(own), Exit(code=1), error, **place)
    assert with_entry.kind is FaultKind.LINK
    assert fault_of_exit(TABLES, Exit(code=1), error, **place).kind is FaultKind.USER_CODE


def test_a_rank_that_the_kernel_killed_for_memory() -> None:
    """A rank that SIGKILL ended has run out of host memory if the node counted such a kill."""
    place = {"rank": 2, "node": 1, "finished": 7, "at": 50.0}
    found = fault_of_exit(TABLES, Exit(signal=9), None, no_memory=True, **place)
    assert found.kind is FaultKind.HOST_OOM
    assert "no memory left" in found.message


LOST_WORKERS = (
    "RuntimeError: DataLoader worker (pid 31) is killed by signal: Killed. ",
    "RuntimeError: DataLoader worker (pid 31) is killed by signal: Segmentation fault. ",
    "RuntimeError: DataLoader worker (pid(s) 31, 32) exited unexpectedly",
    "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated",
)


@pytest.mark.parametrize("no_memory", [True, False])
@pytest.mark.parametrize("text", LOST_WORKERS)
def test_a_lost_helper_is_a_fault_of_a_process(text: str, no_memory: bool) -> None:
    """The loss of a rank's helper is not the script's error. The kernel may have killed it."""
    place = {"rank": 2, "node": 1, "finished": 7, "at": 50.0}
    error = ErrorRecord(message=text)
    found = fault_of_exit(TABLES, Exit(code=1), error, no_memory=no_memory, **place)
    assert found.kind is (FaultKind.HOST_OOM if no_memory else FaultKind.PROCESS)
    assert not found.user_caused
    assert ("no memory left" in found.message) is no_memory
    own = fault_of_exit(
        TABLES, Exit(code=1), ErrorRecord(message="ValueError: no"), no_memory=no_memory, **place
    )
    assert own.kind is FaultKind.USER_CODE


def test_the_time_of_an_exception_is_the_ranks_own() -> None:
    """The time of a fault is the time of the rank's exception, not the time of its exit."""
    record = ErrorRecord(message="E", at=49.0)
    assert (
        fault_of_exit(TABLES, Exit(code=1), record, rank=0, node=0, finished=0, at=50.0).at == 49.0
    )


@given(st.permutations(SEEN))
def test_the_cause_is_found_in_any_order(faults: list[Fault]) -> None:
    """If any other fault can break links, a broken link is not the cause."""
    assert root_cause(faults).kind is FaultKind.USER_CODE
    without = [one for one in faults if one.kind not in (FaultKind.USER_CODE, FaultKind.NODE_LOST)]
    assert root_cause(without).kind is FaultKind.DEVICE


def test_the_end_of_the_output_is_in_the_fault() -> None:
    """The message has the last lines of a rank that raised nothing. They change no verdict."""
    said, silent = (
        fault_of_exit(TABLES, Exit(code=3), None, rank=0, node=0, finished=0, at=0.0, said=text)
        for text in ("device 7 is busy", "")
    )
    assert said.message == f"{silent.message}; the end of its stderr: device 7 is busy"
    assert (said.kind, said.signature) == (silent.kind, silent.signature)
