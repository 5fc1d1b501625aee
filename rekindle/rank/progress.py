"""What a rank shows its agent of where it is: steps finished, and what it is at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.errors import SessionError
from rekindle.protocol.heartbeat_page import Doing, Page

PHASES = {
    "evaluate": Doing.EVALUATE,
    "checkpoint": Doing.CHECKPOINT,
    "compile": Doing.COMPILE,
}


def phase_of(name: str) -> Doing:
    """Return what a script's name for it means.

    Raises SessionError: there is no such phase.
    """
    if name not in PHASES:
        raise SessionError(f"session.phase({name!r}): choose of {', '.join(PHASES)}")
    return PHASES[name]


class Progress:
    """The heartbeat of one rank.

    page: None without an agent. total: the steps that the script wants.
    """

    def __init__(self, page: Page | None) -> None:
        self.page = page
        self.total = 0
        self._first = True  # the next step is the first of its generation

    def _begin(self, doing: Doing) -> None:
        if self.page is not None:
            self.page.begin(doing)

    def _beat(self, finished: int) -> None:
        if self.page is not None:
            self.page.beat(finished)
        self._begin(Doing.BETWEEN)

    def asked_for(self, total: int) -> None:
        """The script wants so many steps."""
        self.total = total
        if self.page is not None:
            self.page.total = total

    def meet(self) -> None:
        """The rank meets the others to form a generation."""
        self._begin(Doing.MEETING)

    def formed(self, finished: int) -> None:
        """A generation begins behind so many finished steps."""
        self._first = True
        self._beat(finished)

    def begin_step(self) -> None:
        """A step's body begins."""
        self._begin(Doing.FIRST if self._first else Doing.STEP)

    def end_step(self, finished: int) -> None:
        """A step is finished."""
        self._first = False
        self._beat(finished)

    def leave(self) -> None:
        """From now on the script is on its own."""
        self._begin(Doing.OUTSIDE)

    @contextmanager
    def at(self, doing: Doing) -> Iterator[None]:
        """The rank is at something else for a while; what it was at begins anew behind it."""
        before = self.page.mark.doing if self.page is not None else Doing.OUTSIDE
        self._begin(doing)
        try:
            yield
        finally:
            self._begin(before)
