"""Define the verdict of a table on a code or a text: one type for all sources."""

from __future__ import annotations

import enum

import msgspec

from rekindle.recovery.faults.fault import FaultKind


class Urgency(str, enum.Enum):
    """Name the required reactions to a fault, the least first."""

    NONE = "none"  # it is not a fault, or has no effect
    WATCH = "watch"  # training continues; a person or a detector may use the information
    LATER = "later"  # training continues; no new work on the place at fault
    SOON = "soon"  # training continues; the node moves before its host ends
    NOW = "now"  # training cannot continue without recovery


class Blame(str, enum.Enum):
    """Name the place that gets no new work if the fault persists."""

    NOTHING = "nothing"
    DEVICE = "device"
    NODE = "node"


class Severity(enum.IntEnum):
    """Name the Ascend driver's (DCMI) severities of events; they matter for unlisted codes."""

    NOTICE = 0
    MINOR = 1
    MAJOR = 2
    CRITICAL = 3


class FaultOrigin(str, enum.Enum):
    """Name the reporters of a code of 8 digits; they matter for unlisted codes."""

    CHIP = "chip"
    NETWORK = "network"  # the chip's port to the parameter plane
    NODE = "node"  # NodeD, which asks the board's management controller


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the knowledge about a fault from its code or text.

    - `kind`: the kind of the fault; it matters only if `urgency` is more than NONE.
    - `urgency`: whether and when a reaction is necessary.
    - `at_fault`: the place to isolate; NOTHING if the user's own code or input is the cause.
    - `explanation`: one sentence for people, including the code.
    - `code`: the code in the table's spelling, so that equal faults have equal codes; empty for
      texts.
    - `level`: the severity in the words of the source; empty if the source has no levels.
    - `user_caused`: the user's code or input is the cause.
    - `counts`: recovery uses up a budget. It is false for evictions, because they are frequent.
    - `reset_helps`: the device can heal after a reset, or after a restart alone.
    - `restart_heals`: the device heals when the processes on it have ended, without a reset.
    - `listed`: the tables have an entry; False: the verdict is from the rule for unlisted ones.
    - `device`: the device's address, if a log line has one.
    """

    kind: FaultKind
    urgency: Urgency
    at_fault: Blame
    explanation: str
    code: str = ""
    level: str = ""
    user_caused: bool = False
    counts: bool = True
    reset_helps: bool = False
    restart_heals: bool = False
    listed: bool = True
    device: str = ""


def unlisted(
    kind: FaultKind, text: str, urgency: Urgency = Urgency.NOW, *, code: str = "", device: str = ""
) -> Verdict:
    """Return the verdict without a table entry: no place is at fault."""
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
