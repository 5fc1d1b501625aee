"""What a table says about a code or a text: one value, whatever the source."""

from __future__ import annotations

import enum

import msgspec

from rekindle.recovery.faults.fault import FaultKind


class Urgency(str, enum.Enum):
    """What the fault asks for; least first."""

    NONE = "none"  # nothing: it is no fault, or one without effect
    WATCH = "watch"  # training goes on; a person or a detector may want to know
    LATER = "later"  # training goes on; no new work for the place that is at fault
    NOW = "now"  # training cannot go on as it is


class Blame(str, enum.Enum):
    """What is to be kept away from new work when the fault does not pass."""

    NOTHING = "nothing"
    DEVICE = "device"
    NODE = "node"


class Severity(enum.IntEnum):
    """How the Ascend driver (DCMI) ranks an event; it matters where no table lists the code."""

    NOTICE = 0
    MINOR = 1
    MAJOR = 2
    CRITICAL = 3


class FaultOrigin(str, enum.Enum):
    """Who reported a code of 8 digits; it matters where no table lists the code."""

    CHIP = "chip"
    NETWORK = "network"  # the chip's port to the parameter plane
    NODE = "node"  # NodeD, which asks the board's management controller


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a fault from its code or text.

    kind: what went wrong; it has a meaning only where `urgency` is more than NONE.
    urgency: whether anything has to be done, and when.
    at_fault: what may be isolated. Never anything for what the user's own code or input caused.
    explanation: one sentence for people, the code included.
    code: the code as its table spells it, so that equal faults have equal codes; empty for texts.
    level: the severity in the words of the source; empty where the source has no levels.
    user_caused: the user's code or input is the cause.
    counts: recovering from it uses up a budget. False for evictions: nobody's fault, and many.
    reset_helps: a reset of the device may help.
    listed: the tables have an entry for it; False: the rule for unlisted ones spoke.
    device: the device's address, where a log line names one.
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
    listed: bool = True
    device: str = ""
