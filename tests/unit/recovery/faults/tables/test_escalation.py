"""Codes that occur too often or stay too long: limits, and a slow model with the same results."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.faults.tables.escalation import Change, in_order, too_long, too_often
from rekindle.recovery.faults.tables.rows import DurationRow, FrequencyRow
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import Blame, Urgency, Verdict
from rekindle.recovery.policy.dialect import Dialect

TABLES = Tables.load(dialect=Dialect.MINDCLUSTER)
DAY = 86_400
UCE, PORT, TWICE, THRICE = "80E01801", "81078603", "80C98008", "80E18005"


def at(code: str, *times: float) -> list[Change]:
    return [Change(code, seconds) for seconds in times]


def spells(code: str, *spells: tuple[float, float]) -> list[Change]:
    """Return changes of a code that is present in each of these periods: start, end."""
    return [
        change
        for begin, end in spells
        for change in (Change(code, begin), Change(code, end, present=False))
    ]


def judged(changes: list[Change], now: float) -> list[str]:
    return [verdict.level for verdict in TABLES.escalated(changes, now)]


@pytest.mark.parametrize(
    ("changes", "now", "levels"),
    [
        ([], 0, []),
        (at(TWICE, 0), 0, []),
        (at(TWICE, 0, DAY), DAY, ["ManuallySeparateNPU"]),  # exactly the length of the window
        (at(TWICE, 0, DAY + 1), DAY + 1, []),
        (at(TWICE, 0, DAY + 0.5, DAY + 1), DAY + 1, ["ManuallySeparateNPU"]),
        (at(TWICE, 5, 5), 5, []),  # reported twice
        (at(TWICE, 5, 9), 8, []),  # the second occurrence is still in the future
        (at(TWICE, 9, 5), 9, ["ManuallySeparateNPU"]),  # in any order
        (at(TWICE, 5) + at(UCE, 9), 9, []),  # separate counts for each code
        (at(TWICE, 5) + at("0x80c98008", 9), 9, ["ManuallySeparateNPU"]),
        (at(TWICE, 5, 9), 1000 * DAY, ["ManuallySeparateNPU"]),  # until a person releases it
        (at(THRICE, 1, 2), 2, []),
        (at(THRICE, 1, 2, 3), 3, ["ManuallySeparateNPU"]),
        (at(UCE, 1, 2) + at(TWICE, 1, 2), 2, ["ManuallySeparateNPU"] * 2),
        (at("80C98002", 1, 2, 3, 4), 4, []),  # a code without a rule
        (at("nonsense", 1, 2, 3, 4), 4, []),
    ],
)  # fmt: skip
def test_frequency(changes: list[Change], now: float, levels: list[str]) -> None:
    """A code that occurs often enough within the window separates the device."""
    assert judged(changes, now) == levels


@pytest.mark.parametrize("dialect", Dialect)
def test_numbers_of_mindcluster_are_for_its_own_policies(dialect: Dialect) -> None:
    """Other policies have the document's rule for all codes. A port keeps its own rule in both."""
    tables, by_mindcluster = Tables.load(dialect=dialect), dialect is Dialect.MINDCLUSTER
    for code in (UCE, TWICE, THRICE):
        assert bool(tables.escalated(at(code, 1, 2, 3), 3)) is by_mindcluster
        assert tables.has_rule_for_repeats(code) is by_mindcluster
    assert tables.has_rule_for_repeats("80C98009") is by_mindcluster
    assert [verdict.level for verdict in tables.escalated(flaps(5), 10_000)] == [
        "ManuallySeparateNPU"
    ]
    assert tables.has_rule_for_repeats(PORT)
    assert not tables.has_rule_for_repeats("79")  # an XID


@pytest.mark.parametrize(
    ("changes", "now", "levels"),
    [
        (at(PORT, 100), 120, []),  # 20 s are not too long
        (at(PORT, 100), 120.001, ["PreSeparateNPU"]),
        (spells(PORT, (100, 120)), 120, []),
        (spells(PORT, (100, 121)), 121, ["PreSeparateNPU"]),
        (spells(PORT, (100, 121)), 181, ["PreSeparateNPU"]),  # 60 s are not enough
        (spells(PORT, (100, 121)), 181.001, []),
        (spells(PORT, (0, 20), (21, 41), (42, 62)), 63, []),  # three short periods make no long one
        (spells(PORT, (0, 21), (81, 82)), 142, ["PreSeparateNPU"]),  # a short absence is ignored
        (spells(PORT, (0, 21), (82, 83)), 84, []),
        (spells(PORT, (0, 0)), 50, []),  # a period without length
        ([Change(PORT, 5, present=False)], 100, []),  # an end without a start
        ([Change(PORT, 30), Change(PORT, 0)], 21, ["PreSeparateNPU"]),  # reported again
    ],
)
def test_duration(changes: list[Change], now: float, levels: list[str]) -> None:
    """A port that stays down keeps new work away until it has been up for long enough."""
    assert judged(changes, now) == levels


def flaps(count: int, lasting: float = 21, gap: float = 100) -> list[Change]:
    return spells(
        PORT, *((n * (lasting + gap), n * (lasting + gap) + lasting) for n in range(count))
    )


def test_only_long_outages_of_a_port_are_counted() -> None:
    """Five long outages of a port in a day separate the device. Short outages do not count."""
    assert judged(flaps(4), 10_000) == []
    assert judged(flaps(5), 10_000) == ["ManuallySeparateNPU"]
    assert judged(flaps(50, lasting=20), 10_000) == []


def test_two_quiet_days_release_a_port() -> None:
    """The separation ends when the code has been absent for longer than the release window."""
    changes = flaps(5)
    last = changes[-1].at
    assert judged(changes, last + 2 * DAY) == ["ManuallySeparateNPU"]
    assert judged(changes, last + 2 * DAY + 1) == []
    again = spells(PORT, (last + 3 * DAY, last + 3 * DAY + 21))
    assert judged(changes + again, last + 3 * DAY + 100) == []  # a new count


def test_verdict_of_an_escalation() -> None:
    """The verdict has the code, the level of the rule and the reason. The device is at fault."""
    (verdict,) = TABLES.escalated(at("0x80e01801", 1, 2), 2)
    assert isinstance(verdict, Verdict)
    assert (verdict.code, verdict.level) == (UCE, "ManuallySeparateNPU")
    assert (verdict.at_fault, verdict.urgency) == (Blame.DEVICE, Urgency.NOW)
    assert not verdict.reset_helps
    assert "2 times within 86400 s" in verdict.explanation


@pytest.mark.timeout(30)
def test_a_huge_history_is_fast() -> None:
    """200,000 changes in random order are judged within the test's time limit."""
    changes = [*flaps(50_000), *at(UCE, *range(0, 100_000 * DAY, DAY + 1))]
    random.Random(1).shuffle(changes)
    assert (
        judged(changes, 1e12) == []
    )  # the port was released; the other code never occurred twice in a day


SECONDS = st.integers(0, 60)


@given(st.lists(SECONDS), st.integers(1, 4), st.integers(0, 20))
def test_frequency_agrees_with_a_slow_model(times: list[int], least: int, window: int) -> None:
    """The device is separated exactly if a window of this length has enough occurrences."""
    rule = FrequencyRow(codes=[UCE], window_s=window, times=least, level="")
    came = [change.at for change in in_order(at(UCE, *times), 60)]
    enough = any(
        last - first <= window for first, last in zip(came, came[least - 1 :], strict=False)
    )
    assert (too_often(rule, came, [], 60) is not None) == enough


@given(st.lists(st.tuples(SECONDS, st.booleans())), st.integers(0, 9), st.integers(0, 9), SECONDS)
def test_duration_agrees_with_a_slow_model(
    seen: list[tuple[int, bool]], after: int, clear: int, now: int
) -> None:
    """A simulation of each second gives the same result."""
    rule = DurationRow(codes=[PORT], after_s=after, clear_after_s=clear, level="")
    changes = in_order([Change(PORT, second, present) for second, present in seen], now)
    lasting, present, since, began = False, False, 0, 0
    for second in range(now + 1):
        if present and not lasting and second - since > after:
            lasting, began = True, began + 1
        if not present and lasting and second - since > clear:
            lasting = False
        for change in changes:
            if change.at == second and change.present != present:
                present, since = change.present, second
    expected = lasting
    found, times = too_long(rule, changes, now)
    assert (found, len(times)) == (expected, began)
    assert all(a < b for a, b in itertools.pairwise(times))


@given(st.permutations(flaps(6) + at(UCE, 3, 4) + at(TWICE, 5)))
def test_the_order_of_a_history_does_not_matter(changes: list[Change]) -> None:
    """The order of the changes and repeated reports do not change the verdicts."""
    expected = sorted(judged(flaps(6) + at(UCE, 3, 4) + at(TWICE, 5), 10_000))
    assert sorted(judged(changes, 10_000)) == expected
    assert sorted(judged(changes + changes, 10_000)) == expected
