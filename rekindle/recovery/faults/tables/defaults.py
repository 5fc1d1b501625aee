"""How an entry of a table becomes a verdict, and what is said where there is no entry."""

from __future__ import annotations

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.rows import LevelRow, Row
from rekindle.recovery.faults.tables.verdict import Blame, Urgency, Verdict

# A level that says nothing: training cannot go on, and nobody knows whose fault it is.
_PLAIN = LevelRow(source="", name="", urgency=Urgency.NOW, says="")


def judge(
    row: Row, text: str, *, code: str = "", level: LevelRow = _PLAIN, device: str = ""
) -> Verdict:
    """Take from the entry what it says, and from its level what it leaves out."""
    kind = row.kind or FaultKind.DEVICE
    urgency = row.urgency or level.urgency
    user_caused = kind is FaultKind.USER_CODE if row.user_caused is None else row.user_caused
    at_fault = row.at_fault or level.at_fault
    if user_caused or urgency is Urgency.NONE:
        at_fault = Blame.NOTHING
    return Verdict(
        kind=kind,
        urgency=urgency,
        at_fault=at_fault,
        explanation=text,
        code=code,
        level=level.name,
        user_caused=user_caused,
        counts=kind is not FaultKind.EVICTION if row.counts is None else row.counts,
        self_heal=level.self_heal if row.self_heal is None else row.self_heal,
        device=device,
    )


def unlisted(
    kind: FaultKind, text: str, urgency: Urgency = Urgency.NOW, *, code: str = "", device: str = ""
) -> Verdict:
    """Say what holds where no table has an entry: nothing is to blame."""
    return Verdict(
        kind=kind,
        urgency=urgency,
        at_fault=Blame.NOTHING,
        explanation=text,
        code=code,
        user_caused=kind is FaultKind.USER_CODE,
        listed=False,
        device=device,
    )
