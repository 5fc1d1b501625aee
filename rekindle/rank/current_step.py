"""The step that is under way, and its end where its generation ends before it.

A rank may lack the last of a step's gradients when another, that had them all, is at its next step
already and fails there. What it lacks is on its way: cut off at once, it would need the state of a
peer, and where there is none, all ranks would have to go back to their snapshots.
"""

from __future__ import annotations

import threading

LIMIT_S = 0.1  # the rest may also be lost with the node that was to send it


class StepUnderWay:
    """Written by the main thread; the channel's thread waits for the step's end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = self._broken = False
        self._finished = 0

    def begin(self) -> None:
        """A step's body begins."""
        self._under_way = True

    def end(self, finished: int) -> None:
        """It has ended well: so many steps are finished now."""
        with self._changed:
            self._under_way, self._finished = False, finished
            self._changed.notify_all()

    def break_off(self) -> None:
        """It raised: nothing more of it is to come."""
        with self._changed:
            self._under_way, self._broken = False, True
            self._changed.notify_all()

    def take_broken(self) -> bool:
        """Say whether a step broke off since this was asked the last time."""
        broken, self._broken = self._broken, False
        return broken

    def wait_end(self, finished: int) -> None:
        """Wait, for LIMIT_S at most, for the end of a step that others have finished.

        finished: steps that they have finished.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._under_way or self._finished >= finished, LIMIT_S
            )
