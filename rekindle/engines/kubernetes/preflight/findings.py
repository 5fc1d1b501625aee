"""What was found out about a cluster before anything is made in it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class FindingState(str, enum.Enum):
    """Whether it is as a job needs it."""

    OK = "ok"
    MISSING = "missing"
    UNKNOWN = "unknown"  # nobody would say, or it depends on what others do


class PreflightFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a job needs.

    what: in a word or two. said: what was found. do: what to do about it. optional: a job runs
    without it.
    """

    what: str
    state: FindingState
    said: str = ""
    do: str = ""
    optional: bool = False

    def in_words(self) -> str:
        """Say it in a sentence, with what to do."""
        return f"{self.what}: {self.said}" + (f" ({self.do})" if self.do else "")


def ok(what: str, said: str = "") -> PreflightFinding:
    """Return that it is there."""
    return PreflightFinding(what=what, state=FindingState.OK, said=said)


def missing(what: str, said: str, do: str = "") -> PreflightFinding:
    """Return that a job cannot be without it."""
    return PreflightFinding(what=what, state=FindingState.MISSING, said=said, do=do)


def unknown(what: str, said: str, do: str = "") -> PreflightFinding:
    """Return that nobody can tell."""
    return PreflightFinding(what=what, state=FindingState.UNKNOWN, said=said, do=do)


def lacking(found: Iterable[PreflightFinding]) -> list[PreflightFinding]:
    """Return what a job cannot be without."""
    return [one for one in found if one.state is FindingState.MISSING and not one.optional]
