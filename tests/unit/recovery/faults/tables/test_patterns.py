"""Messages and kernel lines: each entry matches, no entries disagree, and no pattern is slow."""

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
    """The example of an entry matches that entry and no earlier one."""
    verdict = judged(table, example)
    assert (verdict.kind, verdict.explanation) == (row.kind, row.says)


@pytest.mark.parametrize(("text", "row"), PATTERNS, ids=[text for text, _ in PATTERNS])
def test_every_pattern_has_an_example(text: str, row: PatternRow) -> None:
    """Each pattern matches an example of its entry."""
    assert any(Expression(text).pattern.search(example) for example in row.examples)


@pytest.mark.parametrize(("text", "row"), PATTERNS, ids=[text for text, _ in PATTERNS])
def test_a_part_of_a_word_is_not_the_text(text: str, row: PatternRow) -> None:
    """A pattern does not match what it matches elsewhere if that is only a part of a word."""
    pattern = Expression(text).pattern
    found = [match for match in map(pattern.search, row.examples) if match]
    for match in found:
        words = match[0]
        if re.match(r"\w", words) and not text.startswith("^"):
            assert not pattern.search(f"x{words}")
        if re.search(r"\w$", words) and not text.endswith(r"\w{0,32}"):
            shorter = pattern.search(f"{words}x")
            assert shorter is None or shorter.end() < len(words)


@pytest.mark.parametrize(
    ("table", "example"), [e[:2] for e in EXAMPLES], ids=[e[1] for e in EXAMPLES]
)
def test_the_two_tables_agree(table: str, example: str) -> None:
    """If both tables know a text, they give it the same kind of fault."""
    here, there = judged(table, example), judged("text" if table == "kernel" else "kernel", example)
    assert there.kind in (here.kind, FaultKind.UNKNOWN)


@pytest.mark.parametrize("example", [e for t, e, _ in EXAMPLES if t == "text"])
def test_a_rank_comes_to_the_same_kind(example: str) -> None:
    """A rank and the table derive the same kind from a RuntimeError, or the rank derives none."""
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
    """If a rank recognises a fault by a text, the table has that text with the same kind."""
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
        # An unlisted code in a log line must not isolate a device.
        ("event_id=0x8fffffff", {"kind": FaultKind.UNKNOWN, "code": ""}),
        (
            "usb 1-1: new high-speed USB device",
            {"kind": FaultKind.UNKNOWN, "urgency": Urgency.NONE},
        ),
    ],
)
def test_codes_named_in_a_kernel_line(line: str, expected: dict[str, Any]) -> None:
    """The tables of XIDs and Ascend codes judge the codes in a kernel line."""
    verdict = TABLES.kernel_line(line)
    assert {name: getattr(verdict, name) for name in expected} == expected


def test_unknown_message() -> None:
    """A message without an entry is unknown: no device is at fault, but the job must act."""
    verdict = TABLES.text("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert verdict.kind is FaultKind.UNKNOWN
    assert verdict.urgency is Urgency.NOW
    assert not verdict.listed


def hostile_lines() -> Iterator[str]:
    """Yield lines of a million characters: one repeated character, or a nearly matching text."""
    nearly = [row.examples[0][:-1] for text, row in PATTERNS if "{" in text]
    for part in ["a", " ", "0", "[", "(", ":", *nearly]:
        yield part * (1_000_000 // len(part))


def test_a_hostile_line_is_judged_quickly() -> None:
    """A line of a million characters is judged quickly, whatever text it repeats."""
    slowest = 0.0
    for line in hostile_lines():
        begin = time.process_time()
        TABLES.text(line)
        TABLES.kernel_line(line)
        slowest = max(slowest, time.process_time() - begin)
    assert slowest < 2.0


@pytest.mark.parametrize(("text", "row"), PATTERNS, ids=[text for text, _ in PATTERNS])
def test_no_pattern_searches_without_bound(text: str, row: PatternRow) -> None:
    """Each gap in a pattern is bounded. Without a bound, the time would grow with the square."""
    assert not re.search(r"(?:\.|\[\^[^\]]+\]|\))[*+]", text), row.says


def test_both_ends_of_a_long_text_are_searched() -> None:
    """In a long text, only the start and the end are searched."""
    long = "x" * LONGEST
    assert TABLES.text(f"UCE ERROR {long}").kind is FaultKind.DEVICE_MEMORY
    assert TABLES.text(f"{long} UCE ERROR").kind is FaultKind.DEVICE_MEMORY
    assert TABLES.text(f"{long} UCE ERROR {long}").kind is FaultKind.UNKNOWN
