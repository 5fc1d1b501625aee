"""What is seen of pods and hosts is told to the coordinator, which may be away for a while."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle.errors import JobError, UnansweredError
from rekindle.recovery.faults.classification import Sign

AGAIN_S = 1.0
LATE_S = 300.0  # after which a sign explains nothing any more
_CLOSE_S = 5.0

Report = Callable[[Sign], None]


class Reporter:
    """A thread that tells signs in their order; none is lost because nobody answers just now.

    report: takes a sign; raises UnansweredError where it was not heard, JobError where it means
    nothing: its node came back, or the job ends. tell: takes a sentence for people.
    """

    def __init__(self, report: Report, tell: Callable[[str], None]) -> None:
        self._report = report
        self._tell = tell
        self._signs: queue.SimpleQueue[tuple[Sign, float] | None] = queue.SimpleQueue()
        self._closed = threading.Event()

    @contextmanager
    def open(self) -> Iterator[Report]:
        """Tell meanwhile what is given to what is yielded, which waits for nothing."""
        thread = threading.Thread(target=self._work, name="rekindle-signs", daemon=True)
        thread.start()
        try:
            yield lambda sign: self._signs.put((sign, time.monotonic()))
        finally:
            self._closed.set()
            self._signs.put(None)
            thread.join(_CLOSE_S)

    def _work(self) -> None:
        while (found := self._signs.get()) and not self._closed.is_set():
            sign, since = found
            while not self._is_told(sign):
                if time.monotonic() - since > LATE_S:
                    self._tell(f"{sign.in_words()}: the coordinator was away too long to be told")
                    break
                if self._closed.wait(AGAIN_S):
                    return

    def _is_told(self, sign: Sign) -> bool:
        try:
            self._report(sign)
        except UnansweredError:
            return False
        except JobError:
            return True
        return True
