"""XIDs, exits, nodes and pods, and the rules for every entry of every table."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.faults.classification import (
    EventSource,
    HealthEvent,
    fault_of_exit,
    verdict_of,
)
from rekindle.recovery.faults.fault import Exit, Fault, FaultKind, root_cause
from rekindle.recovery.faults.tables import loading, tables
from rekindle.recovery.faults.tables.loading import SHIPPED, load
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import Blame, Urgency, Verdict

TABLES = Tables.load()
ROWS = load(None).by_key


def every_verdict() -> list[tuple[str, Any, Verdict]]:
    """Return (table, key, verdict) for each key of each table."""
    judges = {
        "ascend": lambda key: TABLES.ascend(ROWS["ascend"][key].spelling(key)),
        "xid": TABLES.xid,
        "kernel": lambda key: TABLES.kernel_line(example_of("kernel", key)),
        "text": lambda key: TABLES.text(example_of("text", key)),
        "exit": lambda key: TABLES.exit(exit_of(key)),
        "node_condition": lambda key: TABLES.node_condition(*key),
        "pod_reason": TABLES.pod_reason,
    }
    return [(table, key, judge(key)) for table, judge in judges.items() for key in ROWS[table]]


def example_of(table: str, pattern: str) -> str:
    return ROWS[table][pattern].examples[0]


def exit_of(key: int | str) -> Exit:
    return Exit(code=key) if isinstance(key, int) else Exit(signal=signal.Signals[key].value)


VERDICTS = every_verdict()


def holds(verdict: Verdict, expected: dict[str, Any]) -> bool:
    return {name: getattr(verdict, name) for name in expected} == expected


@pytest.mark.parametrize("table", sorted(ROWS.keys() - {"frequency", "duration"}))
def test_every_entry_is_reached(table: str) -> None:
    """The verdict of a listed key has the kind and the explanation of its entry."""
    for of, key, verdict in VERDICTS:
        if of == table:
            row = ROWS[table][key]
            assert verdict.listed
            assert row.says in verdict.explanation
            assert verdict.kind is (row.kind or FaultKind.DEVICE)


def test_what_a_user_caused_isolates_nothing() -> None:
    """If a fault is the user's, no node or device is at fault."""
    assert not [v for _, _, v in VERDICTS if v.user_caused and v.at_fault is not Blame.NOTHING]
    assert all(v.user_caused for _, _, v in VERDICTS if v.kind is FaultKind.USER_CODE)


def test_only_evictions_are_not_counted() -> None:
    """Evictions and preemptions use no budget. All other faults do."""
    assert all(v.counts != (v.kind is FaultKind.EVICTION) for _, _, v in VERDICTS)


def test_what_needs_nothing_blames_nothing() -> None:
    """A fault without an urgency isolates and resets nothing.

    A fault that waits for later has a node or a device at fault.
    """
    idle = [v for _, _, v in VERDICTS if v.urgency is Urgency.NONE]
    assert idle
    assert all(v.at_fault is Blame.NOTHING and not v.reset_helps for v in idle)
    later = [v for _, _, v in VERDICTS if v.urgency is Urgency.LATER]
    assert all(v.at_fault is not Blame.NOTHING for v in later)


def test_explanations_are_one_sentence() -> None:
    """An explanation is one line without a full stop, because a decision's reason contains it."""
    for _, key, verdict in VERDICTS:
        text = verdict.explanation
        assert text, key
        assert "\n" not in text
        assert not text.endswith(".")


def test_every_file_tells_its_source() -> None:
    """The first comment of each table names the source of its facts."""
    files = list(SHIPPED.glob("*.toml"))
    assert len(files) == 15
    for path in files:
        head = path.read_text().split("\n\n")[0]
        assert head.startswith("# ")
        assert any(
            word in head for word in ("github.com", "manual", "docs.nvidia.com", "documentation")
        )


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (13, {"kind": FaultKind.PROCESS, "at_fault": Blame.NOTHING, "level": "RESTART_APP"}),
        (43, {"user_caused": True, "urgency": Urgency.NOW, "level": "IGNORE"}),
        (45, {"urgency": Urgency.NONE}),
        (48, {"kind": FaultKind.DEVICE_MEMORY, "at_fault": Blame.DEVICE, "reset_helps": True}),
        (63, {"urgency": Urgency.LATER, "at_fault": Blame.DEVICE}),
        (64, {"urgency": Urgency.NOW, "at_fault": Blame.DEVICE, "reset_helps": False}),
        (74, {"kind": FaultKind.LINK, "at_fault": Blame.DEVICE}),
        (79, {"kind": FaultKind.DEVICE, "at_fault": Blame.NODE, "code": "79"}),
        (92, {"urgency": Urgency.WATCH, "at_fault": Blame.NOTHING}),
        (94, {"kind": FaultKind.DEVICE_MEMORY, "level": "RESTART_APP"}),
        (95, {"kind": FaultKind.DEVICE_MEMORY, "level": "RESET_GPU", "reset_helps": True}),
        (119, {"level": "RESET_GPU", "urgency": Urgency.NOW}),
        (145, {"level": "WORKFLOW_NVLINK5_ERR", "kind": FaultKind.LINK}),
        (154, {"urgency": Urgency.WATCH}),
        (158, {"level": "RESET_GPU", "at_fault": Blame.DEVICE}),
    ],
)
def test_xid(number: int, expected: dict[str, Any]) -> None:
    """XIDs have the verdicts of NVIDIA's catalogue and of Rekindle's own choices."""
    assert holds(TABLES.xid(number), expected)


@given(st.integers())
def test_unlisted_xid(number: int) -> None:
    """An unlisted XID is watched and isolates nothing."""
    verdict = TABLES.xid(number)
    if not verdict.listed:
        assert holds(verdict, {"urgency": Urgency.WATCH, "at_fault": Blame.NOTHING})


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (Exit(code=0), {"kind": FaultKind.USER_CODE}),
        (Exit(code=1), {"kind": FaultKind.USER_CODE, "user_caused": True}),
        (Exit(code=77), {"kind": FaultKind.USER_CODE, "listed": False}),
        (Exit(code=14), {"kind": FaultKind.DEVICE, "at_fault": Blame.DEVICE}),
        (Exit(code=201), {"kind": FaultKind.DEVICE, "reset_helps": True}),
        (Exit(code=247), {"kind": FaultKind.HOST_OOM}),
        (Exit(code=137), {"kind": FaultKind.PROCESS, "counts": True}),
        (Exit(code=134), {"kind": FaultKind.PROCESS}),
        (Exit(code=255), {"kind": FaultKind.USER_CODE, "listed": False}),
        (Exit(signal=9), {"kind": FaultKind.PROCESS}),
        (Exit(signal=15), {"kind": FaultKind.PROCESS}),
        (Exit(signal=40), {"kind": FaultKind.PROCESS, "listed": False}),  # a real-time signal
    ],
    ids=str,
)
def test_exit(end: Exit, expected: dict[str, Any]) -> None:
    """An ordinary exit status is the script's fault. A signal, or a status for a signal, is not."""
    assert holds(TABLES.exit(end), expected)
    assert TABLES.exit(end).explanation.startswith(f"{end}: ")


@given(st.integers(0, 255) | st.none(), st.integers(1, 64))
def test_every_exit_is_judged(code: int | None, number: int) -> None:
    """Each exit status and each signal has a verdict."""
    if code is not None:
        assert TABLES.exit(Exit(code=code)).urgency is Urgency.NOW
    else:
        assert TABLES.exit(Exit(signal=number)).kind is FaultKind.PROCESS


@given(st.integers(1, 128), st.integers(1, 64), st.booleans())
def test_a_rank_and_the_table_agree(code: int, number: int, signalled: bool) -> None:
    """The coordinator derives the same kind from an exit as the table."""
    end = Exit(signal=number) if signalled else Exit(code=code)
    made = fault_of_exit(TABLES, end, None, rank=0, node=0, finished=0, at=0.0)
    assert TABLES.exit(end).kind is made.kind


@pytest.mark.parametrize(
    ("condition", "status", "expected"),
    [
        ("Ready", "True", {"urgency": Urgency.NONE}),
        ("Ready", "False", {"kind": FaultKind.NODE_LOST, "at_fault": Blame.NODE}),
        ("Ready", "Unknown", {"kind": FaultKind.NODE_LOST, "urgency": Urgency.WATCH}),
        ("Exists", "False", {"kind": FaultKind.EVICTION, "urgency": Urgency.WATCH}),
        ("MemoryPressure", "True", {"urgency": Urgency.WATCH, "at_fault": Blame.NOTHING}),
        ("MemoryPressure", "False", {"urgency": Urgency.NONE}),
        ("KernelDeadlock", "True", {"kind": FaultKind.NODE, "at_fault": Blame.NODE}),
        ("AcceleratedHardwareReady", "False", {"kind": FaultKind.DEVICE}),
        ("MyOwnCondition", "True", {"urgency": Urgency.NONE, "listed": False}),
    ],
)
def test_node_condition(condition: str, status: str, expected: dict[str, Any]) -> None:
    """A node condition is a fault if it has the status that its entry names."""
    assert holds(TABLES.node_condition(condition, status), expected)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Evicted", {"kind": FaultKind.EVICTION, "counts": False}),
        ("Preempting", {"kind": FaultKind.EVICTION, "counts": False}),
        ("PreemptionByScheduler", {"counts": False, "at_fault": Blame.NOTHING}),
        ("DeletionByTaintManager", {"counts": False}),
        ("EvictionByEvictionAPI", {"counts": False}),
        ("DeletionByPodGC", {"counts": False}),
        ("TerminationByKubelet", {"counts": False}),
        ("OOMKilled", {"kind": FaultKind.HOST_OOM, "user_caused": True}),
        ("Error", {"kind": FaultKind.UNKNOWN, "listed": False}),
        ("Completed", {"urgency": Urgency.NONE}),
        ("Unschedulable", {"kind": FaultKind.SCHEDULING, "urgency": Urgency.WATCH}),
        ("NodeLost", {"kind": FaultKind.NODE_LOST, "at_fault": Blame.NODE}),
        ("InvalidImageName", {"user_caused": True}),
    ],
)
def test_pod_reason(reason: str, expected: dict[str, Any]) -> None:
    """A pod reason without an entry is an unknown fault."""
    assert holds(TABLES.pod_reason(reason), expected)


@pytest.mark.parametrize(
    ("reason", "code", "words"),
    [
        ("Error", 137, "no table lists it; its container ended with exit status 137"),
        ("OOMKilled", 137, "its container ended with exit status 137: "),
        ("Error", 3, "its container ended with exit status 3: the script chose this status itself"),
    ],
)
def test_exit_status_of_a_pods_container(reason: str, code: int, words: str) -> None:
    """The exit status of a container explains the reason of its pod, and changes no verdict."""
    event = HealthEvent(source=EventSource.POD_REASON, what=reason, node=0, exit_code=code)
    verdict, plain = verdict_of(TABLES, event), TABLES.pod_reason(reason)
    assert words in verdict.explanation
    assert msgspec.structs.replace(verdict, explanation=plain.explanation) == plain


def test_any_two_kinds_have_an_order() -> None:
    """Faults of any two kinds have an order, in which a cause precedes its effect."""
    faults = {kind: Fault(kind=kind, message=kind.value) for kind in FaultKind}
    assert root_cause(list(faults.values())).kind is FaultKind.LAUNCH
    for cause, effect in [
        (FaultKind.EVICTION, FaultKind.NODE_LOST),
        (FaultKind.EVICTION, FaultKind.PROCESS),
        (FaultKind.HOST_OOM, FaultKind.PROCESS),
        (FaultKind.DEVICE_OOM, FaultKind.LINK),
        (FaultKind.NODE_LOST, FaultKind.LINK),
        (FaultKind.HANG, FaultKind.LINK),
        (FaultKind.PROCESS, FaultKind.UNKNOWN),
    ]:
        assert root_cause([faults[effect], faults[cause]]).kind is cause


@pytest.mark.process
def test_what_runs_in_a_job_does_not_read_the_tables() -> None:
    """The processes of the coordinator and the agent load neither the tables nor their loader."""
    readers = [tables.__name__, loading.__name__]
    code = (
        "import sys, rekindle.coordinator.process, rekindle.agent.process;"
        f"print([name for name in {readers} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
