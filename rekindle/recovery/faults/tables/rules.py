"""Entries that are rules: what levels mean, and what makes a code worse than it is."""

from __future__ import annotations

import msgspec

from rekindle.recovery.faults.tables.keys import Key, Wrong, check_codes, keys_of_codes
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
            raise Wrong("release_s", f"release_s is {self.release_s}; give seconds above 0")


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
        raise Wrong(key, f"{key} is {value}; give {least} to {most}")
