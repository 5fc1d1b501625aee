"""The fault of an exit, and the cause among several faults."""

from __future__ import annotations

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


def test_a_rank_that_the_kernel_killed_for_memory() -> None:
    """A rank that SIGKILL ended has run out of host memory if the node counted such a kill."""
    place = {"rank": 2, "node": 1, "finished": 7, "at": 50.0}
    found = fault_of_exit(TABLES, Exit(signal=9), None, no_memory=True, **place)
    assert found.kind is FaultKind.HOST_OOM
    assert "no memory left" in found.message


def test_the_time_of_an_exception_is_the_ranks_own() -> None:
    """The time of a fault is the time of the rank's exception, not the time of its exit."""
    record = ErrorRecord(message="E", at=49.0)
    assert (
        fault_of_exit(TABLES, Exit(code=1), record, rank=0, node=0, finished=0, at=50.0).at == 49.0
    )


@given(st.permutations(SEEN))
def test_the_cause_is_found_in_any_order(seen: list[Fault]) -> None:
    """If any other fault can break links, a broken link is not the cause."""
    assert root_cause(seen).kind is FaultKind.USER_CODE
    without = [one for one in seen if one.kind not in (FaultKind.USER_CODE, FaultKind.NODE_LOST)]
    assert root_cause(without).kind is FaultKind.DEVICE
