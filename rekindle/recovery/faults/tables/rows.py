"""The entries of the fault tables, and the message for a wrong entry."""

from __future__ import annotations

import re
import signal
import warnings
from typing import ClassVar

import msgspec

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.keys import (
    InvalidKey,
    Key,
    ascend_key,
    check_codes,
    keys_of,
    keys_of_codes,
    shown,
)
from rekindle.recovery.faults.tables.verdict import Blame, Urgency


class FrequencyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A code that comes `times` times within `window_s` is handled at `level`.

    The device is released once the code has been absent for more than `release_s` seconds; without
    it, only by a person.
    """

    codes: list[str]
    window_s: float
    times: int
    level: str
    release_s: float | None = None

    def found_by(self) -> list[Key]:
        return keys_of_codes(self.codes)

    def check(self) -> None:
        """Hold the ranges that MindCluster's device plugin holds. Raises Wrong."""
        check_codes(self.codes)
        _check_range("window_s", self.window_s, 60, 864_000)
        _check_range("times", self.times, 1, 100)
        if self.release_s is not None and not 0 < self.release_s < float("inf"):
            raise InvalidKey("release_s", f"release_s is {self.release_s}; give seconds above 0")


class DurationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A code present for more than `after_s` is handled at `level`, until it has been absent for
    more than `clear_after_s` (seconds)."""

    codes: list[str]
    after_s: float
    clear_after_s: float
    level: str

    def found_by(self) -> list[Key]:
        return keys_of_codes(self.codes)

    def check(self) -> None:
        """Hold the ranges that MindCluster's device plugin holds. Raises Wrong."""
        check_codes(self.codes)
        _check_range("after_s", self.after_s, 0, 600)
        _check_range("clear_after_s", self.clear_after_s, 0, 86_400)


class LevelRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a level of severity means; only the shipped tables have these."""

    source: str
    name: str
    urgency: Urgency
    says: str
    at_fault: Blame = Blame.NOTHING
    self_heal: bool = False

    def found_by(self) -> list[Key]:
        return [Key((self.source, self.name), "name", 0)]

    def check(self) -> None:
        """Nothing can be wrong that the types do not tell."""


def _check_range(key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidKey(key, f"{key} is {value}; give {least} to {most}")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What every entry may say; the fields are those of `Verdict`.

    What is left out comes from the entry's level, or else is the least that can be said: `now`,
    nothing at fault, not caused by the user (but kind `user-code`), counted (but evictions).
    """

    FIELD: ClassVar[str]  # the field that holds what the table is searched for

    kind: FaultKind | None = None
    urgency: Urgency | None = None
    at_fault: Blame | None = None
    user_caused: bool | None = None
    counts: bool | None = None
    self_heal: bool | None = None
    says: str = ""

    def found_by(self) -> list[Key]:
        """Give what the entry is found by; no two entries of a file may share one."""
        return keys_of(self.FIELD, getattr(self, self.FIELD))

    def check(self) -> None:
        """Refuse what contradicts itself. Raises Wrong."""
        if not getattr(self, self.FIELD):
            raise InvalidKey(self.FIELD, f"{self.FIELD} is empty; name at least one")
        user_caused = self.user_caused or self.kind is FaultKind.USER_CODE
        if user_caused and self.at_fault not in (None, Blame.NOTHING):
            raise InvalidKey(
                "at_fault",
                "what the user caused isolates nothing; leave out at_fault or user_caused",
            )
        if self.kind is FaultKind.USER_CODE and self.user_caused is False:
            raise InvalidKey("user_caused", "kind user-code is caused by the user; leave it out")
        if self.kind is FaultKind.EVICTION and self.counts:
            raise InvalidKey("counts", "an eviction never counts; leave it out")


class AscendRow(Row, frozen=True, kw_only=True):
    """Ascend fault codes, or ranges of them (A-B)."""

    FIELD = "codes"

    codes: list[str]
    level: str

    def found_by(self) -> list[Key]:
        return keys_of_codes(self.codes)

    def check(self) -> None:
        super().check()
        check_codes(self.codes)

    def spelling(self, key: int | str) -> str:
        """Spell a code of this entry as the entry does, so that equal codes are equal texts."""
        same = (code for code in self.codes if ascend_key(code) == key)
        return shown(next(same, f"{key:08X}" if isinstance(key, int) else key))


class XidRow(Row, frozen=True, kw_only=True):
    """XIDs; their level is NVIDIA's immediate resolution."""

    FIELD = "numbers"

    numbers: list[int]
    level: str

    def check(self) -> None:
        super().check()
        for index, number in enumerate(self.numbers):
            if not 0 < number < 1000:
                raise InvalidKey("numbers", f"{number} is no XID; they begin at 1", index)


class PatternRow(Row, frozen=True, kw_only=True):
    """Regular expressions, searched for in any case; each example shows a text that one finds."""

    FIELD = "patterns"

    patterns: list[str]
    kind: FaultKind
    says: str
    examples: list[str] = []

    def check(self) -> None:
        super().check()
        patterns = [_checked(text, index) for index, text in enumerate(self.patterns)]
        for index, example in enumerate(self.examples):
            if not any(pattern.search(example) for pattern in patterns):
                raise InvalidKey("examples", "no pattern of this entry finds this example", index)


class ExitRow(Row, frozen=True, kw_only=True):
    """Statuses that a process gave itself, or signals that ended it."""

    FIELD = "codes"

    codes: list[int] = []
    signals: list[str] = []
    kind: FaultKind
    says: str

    def found_by(self) -> list[Key]:
        return [*keys_of("codes", self.codes), *keys_of("signals", self.signals)]

    def check(self) -> None:
        if not self.signals:
            super().check()
        for index, code in enumerate(self.codes):
            if not 0 <= code <= 255:
                raise InvalidKey("codes", f"{code} is no exit status; they are 0 to 255", index)
        for index, name in enumerate(self.signals):
            if name not in signal.Signals.__members__:
                raise InvalidKey("signals", f"{name!r} is no signal; write it like SIGTERM", index)


class ConditionRow(Row, frozen=True, kw_only=True):
    """Conditions of a node, and in which status (True, False, Unknown) they are a fault."""

    FIELD = "conditions"

    conditions: list[str]
    status: list[str]
    kind: FaultKind
    says: str

    def found_by(self) -> list[Key]:
        return [
            Key((name, status), "conditions", element)
            for element, name in enumerate(self.conditions)
            for status in self.status
        ]

    def check(self) -> None:
        super().check()
        if not self.status:
            raise InvalidKey("status", "status is empty; name at least one of True, False, Unknown")
        for index, status in enumerate(self.status):
            if status not in ("True", "False", "Unknown"):
                raise InvalidKey("status", f"{status!r} is none of True, False, Unknown", index)


class ReasonRow(Row, frozen=True, kw_only=True):
    """Reasons that Kubernetes gives for the state of a pod or container."""

    FIELD = "reasons"

    reasons: list[str]
    kind: FaultKind
    says: str


def compiled(text: str) -> re.Pattern[str]:
    """Compile a pattern of a table: in any case, and `^` is the beginning of the text."""
    return re.compile(text, re.IGNORECASE)


def _checked(text: str, index: int) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():  # of what a later Python will read in another way
            warnings.simplefilter("error")
            pattern = compiled(text)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise InvalidKey("patterns", f"bad regular expression: {error}", index) from error
    if pattern.search(""):
        raise InvalidKey("patterns", f"{text!r} finds the empty text, and so every text", index)
    return pattern
