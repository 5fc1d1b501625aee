"""The device is stopped when its generation is over, but never in an update that can still end.

A rank that is well may be in a step whose collectives nobody ends. Another thread stops its
device, as MindIO's does, and its main thread raises. What must not be broken off is an update of
the state: all gradients are there, and it ends.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

UPDATE_S = 30.0  # MindIO waits as long for the end of an update
REACH_S = 0.5  # for one to begin that another rank has done: its gradients are on their way


class Brake:
    """stop: stops the device; called by a thread of this class."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._changed = threading.Condition()
        self._limit: int | None = None  # steps that may still be finished; None: it is not pulled
        self._finished = 0
        self._updating = self._broken = self._stopped = self._failed = False

    @property
    def updating(self) -> bool:
        """Whether an update has begun and not ended: the state is of no step."""
        return self._updating

    @property
    def pulled(self) -> bool:
        """Whether the device is to be stopped, or was."""
        return self._limit is not None

    def begin_update(self) -> bool:
        """The update of the next step is about to begin; False: it must not."""
        with self._changed:
            if self._limit is not None and self._finished >= self._limit:
                self._changed.wait_for(lambda: self._stopped or self._limit is None)
                return False
            self._updating = True
            self._changed.notify_all()
            return True

    def end_update(self, finished: int) -> None:
        """It has ended: so many steps are finished."""
        with self._changed:
            self._updating, self._finished = False, finished
            self._changed.notify_all()

    def break_off(self) -> None:
        """The main thread has raised: nothing that it was at is to end any more."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def pull(self, finished: int) -> None:
        """Have the device stopped, by another thread. finished: steps that some rank has done."""
        with self._changed:
            if self._limit is not None:
                return
            self._limit = finished
        threading.Thread(target=self._run, name="rekindle-brake", daemon=True).start()

    def wait(self) -> bool:
        """Wait until the device is stopped; False: that failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._limit is None)
            return not self._failed

    def release(self, finished: int) -> None:
        """Training goes on behind so many steps."""
        with self._changed:
            self._limit, self._finished = None, finished
            self._updating = self._broken = self._stopped = self._failed = False
            self._changed.notify_all()

    def _run(self) -> None:
        with self._changed:
            limit = self._limit or 0
            self._changed.wait_for(
                lambda: self._broken or self._updating or self._finished >= limit, REACH_S
            )
            self._changed.wait_for(lambda: self._broken or not self._updating, UPDATE_S)
        failed = False
        try:
            self._stop()
        except Exception:
            traceback.print_exc(file=sys.stderr)
            failed = True
        with self._changed:
            self._stopped, self._failed = True, failed
            self._changed.notify_all()
