"""Judge the silence of a peer by checks, not by the clock.

A process that was stopped, or whose machine was suspended, reads the messages that wait only after
it continues. So the time in which it did not run says nothing about its peer.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator

GAP_S = 2.0  # a callback that runs so late shows that this process did not run
MOST_GRACE_S = 30.0  # the longest additional time for a peer after a gap


class Reaction(enum.Enum):
    """The next action towards a peer."""

    WAIT = "wait"
    ASK = "ask"  # send a ping
    LOST = "lost"


class Silence:
    """The checks of one peer since its last message.

    ask_after, lost_after: consecutive checks without a message. every_s: seconds between two
    checks.
    """

    def __init__(self, *, ask_after: int, lost_after: int, every_s: float) -> None:
        self._ask_after, self._lost_after, self._every_s = ask_after, lost_after, every_s
        self._checks = 0

    def note_message(self) -> None:
        """Note that a message has arrived."""
        self._checks = 0

    def check(self, gap_s: float) -> Reaction:
        """Count a check. gap_s: the time before it in which this process did not run.

        The peer may have been stopped as well, and may continue later. So after a gap it has as
        much time again, at most MOST_GRACE_S.
        """
        if gap_s > GAP_S:
            self._checks = -round(min(gap_s, MOST_GRACE_S) / self._every_s)
        self._checks += 1
        if self._checks == self._ask_after:
            return Reaction.ASK
        return Reaction.LOST if self._checks == self._lost_after else Reaction.WAIT


async def gaps(every_s: float) -> AsyncIterator[float]:
    """Yield every `every_s`, without an end, how late that is: the time without this process."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every_s
        await asyncio.sleep(every_s)
        yield loop.time() - due
