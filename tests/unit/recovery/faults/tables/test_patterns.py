"""Messages and kernel lines: each entry is reached, none contradicts another, none is slow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.loading import load
from rekindle.recovery.faults.tables.rows import Expression, PatternRow
from rekindle.recovery.faults.tables.tables import LONGEST, Tables
from rekindle.recovery.faults.tables.verdict import Urgency, Verdict
from rekindle.training.torch.faults.repairs import kind_of

TABLES = Tables.load()
ROWS = {table: load(None).by_key[table] for table in ("kernel", "text")}
EXAMPLES = [
    (table, example, row)
    for table, rows in ROWS.items()
    for row in dict.fromkeys(id(row) for row in rows.values())
    for row in [next(own for own in rows.values() if id(own) == row)]
    for example in row.examples
]
PATTERNS = [(text, row) for rows in ROWS.values() for text, row in rows.items()]


def judged(table: str, text: str) -> Verdict:
    return TABLES.kernel_line(text) if table == "kernel" else TABLES.text(text)


@pytest.mark.parametrize(("table", "example", "row"), EXAMPLES, ids=[e for _, e, _ in EXAMPLES])
def test_example_is_judged_by_its_own_entry(table: str, example: str, row: PatternRow) -> None:
    """What an entry gives as its example is found by it and by no entry before it."""
    verdict = judged(table, example)
    assert (verdict.kind, verdict.explanation) == (row.kind, row.says)


@pytest.mark.parametrize(("text", "row"), PATTERNS, ids=[text for text, _ in PATTERNS])
def test_every_pattern_has_an_example(text: str, row: PatternRow) -> None:
    """No pattern stands in a table without a text that it finds."""
    assert any(Expression(text).pattern.search(example) for example in row.examples)


@pytest.mark.parametrize(
    ("table", "example"), [e[:2] for e in EXAMPLES], ids=[e[1] for e in EXAMPLES]
)
def test_the_two_tables_agree(table: str, example: str) -> None:
    """A text that both tables know means the same kind of fault in both."""
    here, there = judged(table, example), judged("text" if table == "kernel" else "kernel", example)
    assert there.kind in (here.kind, FaultKind.UNKNOWN)


@pytest.mark.parametrize("example", [e for t, e, _ in EXAMPLES if t == "text"])
def test_a_rank_comes_to_the_same_kind(example: str) -> None:
    """What a rank sees in a RuntimeError is what the table sees in its text, or it sees nothing."""
    assert kind_of(RuntimeError(example)) in (TABLES.text(example).kind, None)


@pytest.mark.parametrize(
    "text",
    [
        "UCE ERROR", "HBM MULTI BIT ECC ERROR", "SUSPECT MEM ERROR", "uncorrectable ECC error",
        "HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "UB LINK ERROR", "HCCS LINK ERROR",
        "FORCE STOP",
    ],
)  # fmt: skip
def test_the_table_knows_what_a_rank_knows(text: str) -> None:
    """Each text by which a rank recognises a fault is in the table, as the same kind."""
    assert TABLES.text(f"RuntimeError: {text}").kind is kind_of(RuntimeError(text))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "NVRM: Xid (PCI:0000:c6:00): 79, pid=3, GPU has fallen off the bus.",
            {"code": "79", "device": "0000:c6:00", "level": "RESTART_BM"},
        ),
        ("[88.1] NVRM: Xid (0000:03:00): 31, Ch 00000010", {"code": "31"}),
        ("Event id=0x80c98002 raised", {"code": "80C98002", "user_caused": True}),
        ("event_id:  [0x80E01801]", {"code": "80E01801", "kind": FaultKind.DEVICE_MEMORY}),
        ("event_id=0x80e18402,", {"code": "80E18402"}),
        # A code that nobody lists must not isolate a device because a log line names it.
        ("event_id=0x8fffffff", {"kind": FaultKind.UNKNOWN, "code": ""}),
        (
            "usb 1-1: new high-speed USB device",
            {"kind": FaultKind.UNKNOWN, "urgency": Urgency.NONE},
        ),
    ],
)
def test_codes_named_in_a_kernel_line(line: str, expected: dict[str, Any]) -> None:
    """XIDs and Ascend event ids are judged by their own tables."""
    verdict = TABLES.kernel_line(line)
    assert {name: getattr(verdict, name) for name in expected} == expected


def test_unknown_message() -> None:
    """A message that no entry finds is unknown: nothing to blame, but something to act on."""
    verdict = TABLES.text("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert verdict.kind is FaultKind.UNKNOWN
    assert verdict.urgency is Urgency.NOW
    assert not verdict.listed


def hostile_lines() -> Iterator[str]:
    """Lines of a million characters: one character, or what a pattern with a gap almost finds."""
    nearly = [row.examples[0][:-1] for text, row in PATTERNS if "{" in text]
    for part in ["a", " ", "0", "[", "(", ":", *nearly]:
        yield part * (1_000_000 // len(part))


def test_a_hostile_line_is_judged_quickly() -> None:
    """No line of a million characters takes long, whatever it repeats."""
    slowest = 0.0
    for line in hostile_lines():
        begin = time.process_time()
        TABLES.text(line)
        TABLES.kernel_line(line)
        slowest = max(slowest, time.process_time() - begin)
    assert slowest < 2.0


@pytest.mark.parametrize(("text", "row"), PATTERNS, ids=[text for text, _ in PATTERNS])
def test_no_pattern_searches_without_bound(text: str, row: PatternRow) -> None:
    """A gap that any text may fill is bounded: else the time would grow with the square."""
    assert not re.search(r"(?:\.|\[\^[^\]]+\]|\))[*+]", text), row.says


def test_both_ends_of_a_long_text_are_searched() -> None:
    """What is said at the beginning or end of a long text is found; its middle is passed over."""
    long = "x" * LONGEST
    assert TABLES.text(f"UCE ERROR {long}").kind is FaultKind.DEVICE_MEMORY
    assert TABLES.text(f"{long} UCE ERROR").kind is FaultKind.DEVICE_MEMORY
    assert TABLES.text(f"{long} UCE ERROR {long}").kind is FaultKind.UNKNOWN
