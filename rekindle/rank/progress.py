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
    """The heartbeat of one rank; page None: nobody looks on."""

    def __init__(self, page: Page | None) -> None:
        self._page = page
        self._first = True  # the next step is the first of its generation

    def _begin(self, doing: Doing) -> None:
        if self._page is not None:
            self._page.begin(doing)

    def _beat(self, finished: int) -> None:
        if self._page is not None:
            self._page.beat(finished)
        self._begin(Doing.BETWEEN)

    def asked_for(self, total: int) -> None:
        """The script wants so many steps."""
        if self._page is not None:
            self._page.total = total

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
        before = self._page.mark.doing if self._page is not None else Doing.OUTSIDE
        self._begin(doing)
        try:
            yield
        finally:
            self._begin(before)
