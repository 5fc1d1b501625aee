"""Ascend fault codes: their levels, their spellings, and the verdicts for unlisted codes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.loading import load
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import Blame, FaultOrigin, Severity, Urgency
from rekindle.recovery.policy.dialect import Dialect

TABLES = Tables.load()
ROWS = load(None)
CODES = {key: row.spelling(key) for key, row in ROWS.by_key["ascend"].items()}
LEVELS = [name for source, name in ROWS.levels if source == "ascend"]


def test_codes_per_level() -> None:
    """The tables have as many codes as MindCluster's files: chips, public, nodes and switches.

    A2301001 and B4060011 occur twice in these files.
    """
    counts = Counter(row.level for row in ROWS.by_key["ascend"].values())
    assert counts == {
        "NotHandleFault": 132 + 5 + 7 + 12,
        "SubHealthFault": 13 + 10 + 8,
        "RestartRequest": 33,
        "RestartBusiness": 26 - 2,
        "FreeRestartNPU": 23,
        "RestartNPU": 162,
        "PreSeparateNPU": 200 + 2,
        "SeparateNPU": 215 + 13,
        "PreSeparateFault": 51,
        "SeparateFault": 1 + 9,
        "RestartRequestFault": 1,
    }


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("80C98002", {"level": "RestartRequest", "user_caused": True, "reset_helps": True}),
        ("80CB8002", {"level": "RestartRequest", "user_caused": True, "at_fault": Blame.NOTHING}),
        ("80C98008", {"level": "RestartRequest", "at_fault": Blame.DEVICE, "user_caused": False}),
        (
            "80E01801",
            {"level": "RestartBusiness", "kind": FaultKind.DEVICE_MEMORY, "reset_helps": True},
        ),
        ("80E18402", {"level": "SeparateNPU", "kind": FaultKind.DEVICE, "reset_helps": False}),
        ("A2301001", {"level": "SeparateNPU"}),  # in two lists; the worse entry comes first
        ("B4060011", {"level": "RestartBusiness"}),
        ("80E38008", {"level": "RestartNPU", "urgency": Urgency.NOW, "reset_helps": True}),
        ("8C084E00", {"level": "FreeRestartNPU", "urgency": Urgency.NOW, "reset_helps": True}),
        ("8F19A04E", {"level": "PreSeparateNPU", "urgency": Urgency.LATER}),
        ("8F19A04F", {"level": "SeparateNPU", "listed": False}),  # directly after a range
        ("80C98006", {"level": "NotHandleFault", "urgency": Urgency.NONE}),
        ("81078603", {"level": "NotHandleFault", "kind": FaultKind.LINK}),
        ("81AD8605", {"level": "SubHealthFault", "urgency": Urgency.WATCH}),
        ("200001002", {"kind": FaultKind.HANG, "urgency": Urgency.NONE}),
        ("110001010", {"kind": FaultKind.STRAGGLER, "at_fault": Blame.NODE}),
        ("020001001", {"level": "SeparateNPU", "code": "020001001"}),
        ("2C000031", {"level": "SeparateFault", "kind": FaultKind.NODE, "at_fault": Blame.NODE}),
        ("0000001D", {"level": "PreSeparateFault", "urgency": Urgency.LATER}),
        ("[0x00f1fef5,155914,npu,na]", {"level": "RestartRequestFault", "at_fault": Blame.NODE}),
        ("[0x08520003,na,L2,na]", {"level": "NotHandleFault", "code": "[0x08520003,na,l2,na]"}),
    ],
)
def test_listed_code(code: str, expected: dict[str, Any]) -> None:
    """A listed code of each level and source has the verdict of its file."""
    verdict = TABLES.ascend(code)
    assert {name: getattr(verdict, name) for name in expected} == expected


def spellings(code: str) -> list[str]:
    if code.startswith("["):
        return [code.upper(), code.replace(",", ", ")]
    without_zero = [code[1:]] if len(code) == 9 and code[0] == "0" else []
    return [code.lower(), f" {code} ", f"0x{code}", f"0X{code.lower()}", *without_zero]


def test_every_code_is_found_in_every_spelling() -> None:
    """Case, 0x, spaces and leading zeros make no difference, and the verdict has the plain code."""
    for code in CODES.values():
        verdict = TABLES.ascend(code)
        assert verdict.listed
        assert verdict.code == code
        assert code in verdict.explanation
        assert {TABLES.ascend(other).explanation for other in spellings(code)} == {
            verdict.explanation
        }


@given(st.sampled_from(list(CODES.values())), st.randoms())
def test_any_mixture_of_cases(code: str, random: Any) -> None:
    """The case of single letters does not change the verdict of a code."""
    mixed = "".join(random.choice((str.lower, str.upper))(letter) for letter in code)
    assert TABLES.ascend(mixed) == TABLES.ascend(code)


IGNORED, RESET, SEPARATED = "NotHandleFault", "RestartNPU", "SeparateNPU"


@pytest.mark.parametrize(
    ("severity", "by_document", "by_mindcluster"),
    [
        (None, SEPARATED, SEPARATED),
        (Severity.NOTICE, IGNORED, IGNORED),
        (Severity.MINOR, RESET, IGNORED),
        (Severity.MAJOR, RESET, SEPARATED),
        (Severity.CRITICAL, SEPARATED, SEPARATED),
    ],
)
@pytest.mark.parametrize("dialect", Dialect)
def test_unlisted_code_of_a_chip(
    severity: Severity | None, by_document: str, by_mindcluster: str, dialect: Dialect
) -> None:
    """In the document, minor and major faults can heal. MindCluster ignores or separates them."""
    level = by_mindcluster if dialect is Dialect.MINDCLUSTER else by_document
    verdict = Tables.load(dialect=dialect).ascend("0x8abcdef0", severity)
    assert (verdict.level, verdict.listed, verdict.code) == (level, False, "8ABCDEF0")
    assert (verdict.urgency is Urgency.NOW) == (level != IGNORED)
    assert (verdict.at_fault is Blame.DEVICE) == (level != IGNORED)
    assert verdict.reset_helps == (level == RESET)


@pytest.mark.parametrize("severity", [None, *Severity])
def test_unlisted_code_of_a_port(severity: Severity | None) -> None:
    """An unlisted code of a port keeps new work away, at any severity."""
    verdict = TABLES.ascend("8ABCDEF0", severity, FaultOrigin.NETWORK)
    assert (verdict.level, verdict.urgency) == ("PreSeparateNPU", Urgency.LATER)
    assert verdict.kind is FaultKind.LINK


@pytest.mark.parametrize(
    ("code", "origin"),
    [
        (
            "123456789",
            FaultOrigin.CHIP,
        ),  # a public fault; ClusterD drops unlisted public faults
        ("[0x00f1fef5,1,npu,na]", FaultOrigin.CHIP),
        ("7ABCDEF0", FaultOrigin.NODE),
        ("nonsense", FaultOrigin.CHIP),
        ("", FaultOrigin.CHIP),
        ("80C98002, 80CB8002", FaultOrigin.CHIP),
    ],
)
def test_what_is_passed_over(code: str, origin: FaultOrigin) -> None:
    """Unlisted codes of public faults, switches and nodes, and malformed codes, change nothing."""
    verdict = TABLES.ascend(code, Severity.CRITICAL, origin)
    assert (verdict.urgency, verdict.at_fault) == (Urgency.NONE, Blame.NOTHING)
    assert not verdict.listed


def test_origin_and_severity_do_not_matter_for_listed_codes() -> None:
    """The verdict of a listed code does not depend on the reported severity and origin."""
    plain = TABLES.ascend("80C98002")
    assert all(TABLES.ascend("80C98002", s, o) == plain for s in Severity for o in FaultOrigin)


@given(st.text(max_size=30), st.sampled_from([None, *Severity]), st.sampled_from(FaultOrigin))
def test_anything_is_judged(code: str, severity: Severity | None, origin: FaultOrigin) -> None:
    """No text makes the lookup fail."""
    assert TABLES.ascend(code, severity, origin).explanation


def test_levels() -> None:
    """The tables know all levels of MindCluster, and each entry has one of these levels."""
    assert {row.level for row in ROWS.by_key["ascend"].values()} | {
        "ManuallySeparateNPU",
        "ResetFault",  # a level of MindCluster without a code
    } == set(LEVELS)
