"""One long run that consists of acts, with one test for each act.

A fixture runs all acts once, in order. The test of an act fails with the error of that act. After
an error, the remaining acts do not run, and their tests fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Played:
    """The acts that ran on one subject, and the error that ended them."""

    def __init__(self, acts: Sequence[Callable[[T], None]], subject: T) -> None:
        self._done: list[str] = []
        self._broken = ""
        self._error: Exception | None = None
        for act in acts:
            try:
                act(subject)
            except Exception as error:
                self._broken, self._error = act.__name__, error
                return
            self._done.append(act.__name__)

    def check(self, act: str) -> None:
        """Raise the error of this act, if the act failed.

        Raises AssertionError: the act did not run, because an earlier act failed.
        """
        if act == self._broken and self._error is not None:
            raise self._error
        assert act in self._done, f"not played: {self._broken} failed: {self._error}"


def names(acts: Sequence[Callable[[T], None]]) -> list[str]:
    """Return the names of acts, for pytest.mark.parametrize."""
    return [act.__name__ for act in acts]
