"""What an HBM multi-bit ECC error may have spoiled: everything that was made after it. Pure.

Such an error is told late. What an update took in before its time is right; gradients that were
computed after it may be wrong, and an update with them is wrong on all ranks alike, for they are
all-reduced. The rule by time is that of MindIO TFT (`tft_can_do_uce_repair`): the state is repaired
from a replica if the error came after the newest update had begun. Where it came before, MindIO
goes back to a checkpoint; here the states before the first suspect update are known to be right.
"""

from __future__ import annotations

import re
from collections import deque

_ERROR = re.compile(r"HBM MULTI BIT ECC", re.IGNORECASE)
# torch-npu 2.14 says "time is <us>", what MindIO looks for is "time us=<us>".
_TIME = re.compile(r"time (?:is|us\s*=)\s*(\d+)", re.IGNORECASE)
_KEPT = 1024  # updates; an error is not told later than so many


class UpdateTimes:
    """When the updates began that led to this rank's state: (steps finished by it, microseconds).

    Of an update before the oldest one that is known, nothing is suspected.
    """

    def __init__(self) -> None:
        self._began: deque[tuple[int, int]] = deque(maxlen=_KEPT)

    def begin(self, step: int, at_us: int) -> None:
        """The update begins that finishes step `step`, by the clock that errors are told in."""
        while self._began and self._began[-1][0] >= step:
            self._began.pop()  # it is done again
        self._began.append((step, at_us))

    def clean_after(self, error: BaseException) -> int | None:
        """The newest step before the first suspect update; None: no update is suspect.

        An error that tells no time may be older than the newest update, so that is suspect.
        """
        text = str(error)
        if not _ERROR.search(text) or not self._began:
            return None
        told = _TIME.search(text)
        if told is None:
            return self._began[-1][0] - 1
        suspect = (step for step, at_us in self._began if at_us >= int(told[1]))
        first = next(suspect, None)
        return None if first is None else first - 1
