"""Define the entries of the fault tables: types, limits, contradictions, and verdicts.

`found_by` of a row returns the keys of the entry. Two entries of a file must not share a key.
"""

from __future__ import annotations

import re
import signal
import warnings
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.keys import (
    AscendCode,
    Key,
    ascend_key,
    ascend_keys,
    shown,
)
from rekindle.recovery.faults.tables.verdict import Blame, Urgency
from rekindle.recovery.policy.dialect import Dialect
from rekindle.user_file import FieldError

Codes: TypeAlias = Annotated[
    list[AscendCode], Meta(min_length=1, description="codes, or ranges of them, in quotes")
]
Texts: TypeAlias = Annotated[list[str], Meta(min_length=1, description="at least one text")]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1e9, description="more than 0, at most 1e9")]
_BORDER = r"(?:\b|(?<!\w))"  # not between two characters of one word


class Keyed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold the keys of an entry. `KEYS` names the fields with lists of them."""

    KEYS: ClassVar[tuple[str, ...]] = ("codes",)

    def found_by(self) -> list[Key]:
        return [
            Key(key, field, element)
            for field in self.KEYS
            for element, value in enumerate(getattr(self, field))
            for key in (ascend_keys(value) if isinstance(value, AscendCode) else (value,))
        ]


class FrequencyRow(Keyed, frozen=True, kw_only=True):
    """Set the `level` of a code that occurs `times` times within `window_s`.

    The device is released when the code has been absent for more than `release_s` seconds. Without
    `release_s`, only a person releases it. The limits of the numbers are those of MindCluster's
    device plugin. `dialect`: the policies to which the rule applies; None: all.
    """

    codes: Codes
    window_s: Annotated[float, Meta(ge=60, le=864_000, description="60 to 864000 seconds")]
    times: Annotated[int, Meta(ge=1, le=100, description="1 to 100")]
    level: str
    release_s: Seconds | None = None
    dialect: Dialect | None = None


class DurationRow(Keyed, frozen=True, kw_only=True):
    """Set the `level` of a code that is present for more than `after_s`.

    The level applies until the code has been absent for more than `clear_after_s`. Times are
    seconds. The limits are those of MindCluster's device plugin.
    """

    codes: Codes
    after_s: Annotated[float, Meta(ge=0, le=600, description="0 to 600 seconds")]
    clear_after_s: Annotated[float, Meta(ge=0, le=86_400, description="0 to 86400 seconds")]
    level: str


class LevelRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Define a level of severity; only the shipped tables have these."""

    source: str
    name: str
    urgency: Urgency
    says: str
    at_fault: Blame = Blame.NOTHING
    reset_helps: bool = False
    restart_heals: bool = False

    def found_by(self) -> list[Key]:
        return [Key((self.source, self.name), "name", 0)]


class Row(Keyed, frozen=True, kw_only=True):
    """Hold the fields of every entry; they are those of `Verdict`.

    A missing value comes from the entry's level. Without a level the defaults apply: `now`, no
    place at fault, and not caused by the user, except for kind `user-code`. Faults count by
    default, except evictions. Raises FieldError: the entry contradicts itself.
    """

    kind: FaultKind | None = None
    urgency: Urgency | None = None
    at_fault: Blame | None = None
    user_caused: bool | None = None
    counts: bool | None = None
    reset_helps: bool | None = None
    restart_heals: bool | None = None
    says: str = ""

    def __post_init__(self) -> None:
        user_caused = self.user_caused or self.kind is FaultKind.USER_CODE
        if user_caused and self.at_fault not in (None, Blame.NOTHING):
            raise FieldError(
                "a fault that the user caused never isolates a node or device; leave out "
                "at_fault or user_caused",
                "at_fault",
            )
        if self.kind is FaultKind.USER_CODE and self.user_caused is False:
            raise FieldError(
                "the user always causes a fault of kind user-code; leave out user_caused",
                "user_caused",
            )
        if self.kind is FaultKind.EVICTION and self.counts:
            raise FieldError("an eviction never counts; leave out counts", "counts")
        if self.restart_heals and self.reset_helps is False:
            raise FieldError(
                "restart_heals is for a device that can heal; leave out reset_helps", "reset_helps"
            )


class AscendRow(Row, frozen=True, kw_only=True):
    """Describe Ascend fault codes, or ranges of them (A-B)."""

    codes: Codes
    level: str

    def spelling(self, key: int | str) -> str:
        """Return the entry's spelling of one of its codes, so that equal codes are equal texts."""
        same = (code for code in self.codes if ascend_key(code) == key)
        return shown(next(same, f"{key:08X}" if isinstance(key, int) else key))


class XidRow(Row, frozen=True, kw_only=True):
    """Describe XIDs; their level is NVIDIA's immediate resolution."""

    KEYS = ("numbers",)

    numbers: Annotated[
        list[Annotated[int, Meta(ge=1, le=999)]],
        Meta(min_length=1, description="at least one XID from 1 to 999"),
    ]
    level: str


class Expression(str):
    """Hold a regular expression of whole words, without case; `^` is the start of the text.

    "Broken pipe" is not in "Broken pipeline". Raises ValueError: the expression is invalid, or it
    matches every text.
    """

    pattern: re.Pattern[str]

    def __new__(cls, text: str) -> Expression:
        instance = super().__new__(cls, text)
        try:
            with warnings.catch_warnings():  # for syntax that a later Python interprets differently
                warnings.simplefilter("error")
                re.compile(text)  # alone, because its parentheses must be balanced
                instance.pattern = re.compile(f"{_BORDER}(?:{text}){_BORDER}", re.IGNORECASE)
        except (re.error, OverflowError, RecursionError, Warning) as error:
            raise ValueError(f"invalid regular expression: {error}") from error
        if instance.pattern.search(""):
            raise ValueError(f"{text!r} matches the empty text, and so every text")
        return instance


class PatternRow(Row, frozen=True, kw_only=True):
    """Describe regular expressions; each example is a text that one of them matches."""

    KEYS = ("patterns",)

    patterns: Annotated[list[Expression], Meta(min_length=1)]
    kind: FaultKind
    says: str
    examples: list[str] = []

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, example in enumerate(self.examples):
            if not any(each.pattern.search(example) for each in self.patterns):
                raise FieldError("no pattern of this entry matches this example", "examples", index)


class SignalName(str):
    """Hold the name of a signal, for example SIGTERM. Raises ValueError: it does not exist."""

    def __new__(cls, text: str) -> SignalName:
        if text not in signal.Signals.__members__:
            raise ValueError(f"{text!r} is not a signal; write a name such as SIGTERM")
        return super().__new__(cls, text)


class ExitRow(Row, frozen=True, kw_only=True):
    """Describe statuses that a process returned, or signals that ended it."""

    KEYS = ("codes", "signals")

    codes: Annotated[
        list[Annotated[int, Meta(ge=0, le=255)]], Meta(description="exit statuses, 0 to 255")
    ] = []
    signals: list[SignalName] = []
    kind: FaultKind
    says: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.codes and not self.signals:
            raise FieldError("codes and signals are empty; give at least one")


class ConditionRow(Row, frozen=True, kw_only=True):
    """Describe conditions of a node, and the statuses in which they are a fault."""

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
    """Describe Kubernetes' reasons for the state of a pod or container."""

    KEYS = ("reasons",)

    reasons: Texts
    kind: FaultKind
    says: str
