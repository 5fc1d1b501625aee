"""Define the results of the checks of a cluster."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class FindingState(str, enum.Enum):
    """The result of a check."""

    OK = "ok"
    MISSING = "missing"
    UNKNOWN = "unknown"  # no answer, or it depends on other users


class PreflightFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One requirement of a job.

    `what`: a short name. `result`: the result. `do`: the correction. `optional`: a job runs without
    it.
    """

    what: str
    state: FindingState
    result: str = ""
    do: str = ""
    optional: bool = False

    def in_words(self) -> str:
        """Return a sentence with the result and the correction."""
        return f"{self.what}: {self.result}" + (f" ({self.do})" if self.do else "")


def ok(what: str, result: str = "", *, optional: bool = False) -> PreflightFinding:
    """Return the finding that a requirement is met."""
    return PreflightFinding(what=what, state=FindingState.OK, result=result, optional=optional)


def missing(what: str, result: str, do: str = "", *, optional: bool = False) -> PreflightFinding:
    """Return the finding that a requirement is not met."""
    return PreflightFinding(
        what=what, state=FindingState.MISSING, result=result, do=do, optional=optional
    )


def unknown(what: str, result: str, do: str = "", *, optional: bool = False) -> PreflightFinding:
    """Return the finding that the result is unknown."""
    return PreflightFinding(
        what=what, state=FindingState.UNKNOWN, result=result, do=do, optional=optional
    )


def lacking(found: Iterable[PreflightFinding]) -> list[PreflightFinding]:
    """Return the findings that prevent a job."""
    return [one for one in found if one.state is FindingState.MISSING and not one.optional]
