"""What was found out about a cluster before anything is made in it."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class State(str, enum.Enum):
    """Whether it is as a job needs it."""

    OK = "ok"
    MISSING = "missing"
    UNKNOWN = "unknown"  # nobody would say, or it depends on what others do


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a job needs.

    what: in a word or two. said: what was found. do: what to do about it. optional: a job runs
    without it.
    """

    what: str
    state: State
    said: str = ""
    do: str = ""
    optional: bool = False

    def in_words(self) -> str:
        """Say it in a sentence, with what to do."""
        return f"{self.what}: {self.said}" + (f" ({self.do})" if self.do else "")


def ok(what: str, said: str = "") -> Finding:
    """Return that it is there."""
    return Finding(what=what, state=State.OK, said=said)


def missing(what: str, said: str, do: str = "") -> Finding:
    """Return that a job cannot be without it."""
    return Finding(what=what, state=State.MISSING, said=said, do=do)


def unknown(what: str, said: str, do: str = "") -> Finding:
    """Return that nobody can tell."""
    return Finding(what=what, state=State.UNKNOWN, said=said, do=do)


def lacking(found: Iterable[Finding]) -> list[Finding]:
    """Return what a job cannot be without."""
    return [one for one in found if one.state is State.MISSING and not one.optional]
