"""The entries of the fault tables: types, limits, contradictions, and the verdict of an entry.

`found_by` of a row returns what the entry is found by; no two entries of a file may share one.
"""

from __future__ import annotations

import re
import signal
import warnings
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.keys import (
    AscendCode,
    Key,
    ascend_key,
    keys_of,
    keys_of_codes,
    shown,
)
from rekindle.recovery.faults.tables.verdict import Blame, Urgency, Verdict
from rekindle.user_file import FieldError

Codes: TypeAlias = Annotated[
    list[AscendCode], Meta(min_length=1, description="codes, or ranges of them, in quotes")
]
Texts: TypeAlias = Annotated[list[str], Meta(min_length=1, description="one text or more")]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1e9, description="more than 0, at most 1e9")]


class FrequencyRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A code that comes `times` times within `window_s` is handled at `level`.

    The device is released once the code has been absent for more than `release_s` seconds; without
    it, only by a person. The limits of the numbers are those of MindCluster's device plugin.
    """

    codes: Codes
    window_s: Annotated[float, Meta(ge=60, le=864_000, description="60 to 864000 seconds")]
    times: Annotated[int, Meta(ge=1, le=100, description="1 to 100")]
    level: str
    release_s: Seconds | None = None

    def found_by(self) -> list[Key]:
        return keys_of_codes(self.codes)


class DurationRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A code present for more than `after_s` is handled at `level`, until it has been absent for
    more than `clear_after_s` (seconds). The limits are those of MindCluster's device plugin."""

    codes: Codes
    after_s: Annotated[float, Meta(ge=0, le=600, description="0 to 600 seconds")]
    clear_after_s: Annotated[float, Meta(ge=0, le=86_400, description="0 to 86400 seconds")]
    level: str

    def found_by(self) -> list[Key]:
        return keys_of_codes(self.codes)


class LevelRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a level of severity means; only the shipped tables have these."""

    source: str
    name: str
    urgency: Urgency
    says: str
    at_fault: Blame = Blame.NOTHING
    reset_helps: bool = False

    def found_by(self) -> list[Key]:
        return [Key((self.source, self.name), "name", 0)]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every entry may say; the fields are those of `Verdict`.

    What is left out comes from the entry's level, or else is the least that can be said: `now`,
    nothing at fault, not caused by the user (but kind `user-code`), counted (but evictions).
    Raises FieldError: the entry contradicts itself.
    """

    kind: FaultKind | None = None
    urgency: Urgency | None = None
    at_fault: Blame | None = None
    user_caused: bool | None = None
    counts: bool | None = None
    reset_helps: bool | None = None
    says: str = ""

    def __post_init__(self) -> None:
        user_caused = self.user_caused or self.kind is FaultKind.USER_CODE
        if user_caused and self.at_fault not in (None, Blame.NOTHING):
            raise FieldError(
                "what the user caused isolates nothing; leave out at_fault or user_caused",
                "at_fault",
            )
        if self.kind is FaultKind.USER_CODE and self.user_caused is False:
            raise FieldError("kind user-code is caused by the user; leave it out", "user_caused")
        if self.kind is FaultKind.EVICTION and self.counts:
            raise FieldError("an eviction never counts; leave it out", "counts")


class AscendRow(Row, frozen=True, kw_only=True):
    """Ascend fault codes, or ranges of them (A-B)."""

    codes: Codes
    level: str

    def found_by(self) -> list[Key]:
        return keys_of_codes(self.codes)

    def spelling(self, key: int | str) -> str:
        """Spell a code of this entry as the entry does, so that equal codes are equal texts."""
        same = (code for code in self.codes if ascend_key(code) == key)
        return shown(next(same, f"{key:08X}" if isinstance(key, int) else key))


class XidRow(Row, frozen=True, kw_only=True):
    """XIDs; their level is NVIDIA's immediate resolution."""

    numbers: Annotated[
        list[Annotated[int, Meta(ge=1, le=999)]],
        Meta(min_length=1, description="one XID or more, 1 to 999"),
    ]
    level: str

    def found_by(self) -> list[Key]:
        return keys_of("numbers", self.numbers)


class Expression(str):
    """A regular expression, searched for in any case; `^` is the beginning of the text.

    Raises ValueError: it is none, or finds every text.
    """

    pattern: re.Pattern[str]

    def __new__(cls, text: str) -> Expression:
        made = super().__new__(cls, text)
        try:
            with warnings.catch_warnings():  # of what a later Python will read in another way
                warnings.simplefilter("error")
                made.pattern = re.compile(text, re.IGNORECASE)
        except (re.error, OverflowError, RecursionError, Warning) as error:
            raise ValueError(f"bad regular expression: {error}") from error
        if made.pattern.search(""):
            raise ValueError(f"{text!r} finds the empty text, and so every text")
        return made


class PatternRow(Row, frozen=True, kw_only=True):
    """Regular expressions; each example shows a text that one finds."""

    patterns: Annotated[list[Expression], Meta(min_length=1)]
    kind: FaultKind
    says: str
    examples: list[str] = []

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, example in enumerate(self.examples):
            if not any(each.pattern.search(example) for each in self.patterns):
                raise FieldError("no pattern of this entry finds this example", "examples", index)

    def found_by(self) -> list[Key]:
        return keys_of("patterns", self.patterns)


class SignalName(str):
    """A signal like SIGTERM. Raises ValueError: there is none of that name."""

    def __new__(cls, text: str) -> SignalName:
        if text not in signal.Signals.__members__:
            raise ValueError(f"{text!r} is no signal; write it like SIGTERM")
        return super().__new__(cls, text)


class ExitRow(Row, frozen=True, kw_only=True):
    """Statuses that a process gave itself, or signals that ended it."""

    codes: Annotated[
        list[Annotated[int, Meta(ge=0, le=255)]], Meta(description="exit statuses, 0 to 255")
    ] = []
    signals: list[SignalName] = []
    kind: FaultKind
    says: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.codes and not self.signals:
            raise FieldError("codes and signals are empty; name at least one")

    def found_by(self) -> list[Key]:
        return [*keys_of("codes", self.codes), *keys_of("signals", self.signals)]


class ConditionRow(Row, frozen=True, kw_only=True):
    """Conditions of a node, and in which status they are a fault."""

    conditions: Texts
    status: Annotated[list[Literal["True", "False", "Unknown"]], Meta(min_length=1)]
    kind: FaultKind
    says: str

    def found_by(self) -> list[Key]:
        return [
            Key((name, status), "conditions", element)
            for element, name in enumerate(self.conditions)
            for status in self.status
        ]


class ReasonRow(Row, frozen=True, kw_only=True):
    """Reasons that Kubernetes gives for the state of a pod or container."""

    reasons: Texts
    kind: FaultKind
    says: str

    def found_by(self) -> list[Key]:
        return keys_of("reasons", self.reasons)


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
        reset_helps=level.reset_helps if row.reset_helps is None else row.reset_helps,
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
