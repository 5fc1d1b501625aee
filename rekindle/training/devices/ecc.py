"""What an HBM multi-bit ECC error may have spoiled: everything that was made after it. Pure.

Such an error is told late. What an update took in before its time is right; gradients that were
computed after it may be wrong, and an update with them is wrong on all ranks alike, for they are
all-reduced. MindIO TFT decides by the same times whether a replica can be used at all
(`tft_can_do_uce_repair`), else goes back to a checkpoint; here the error tells the newest state
that is right, and what is newer is passed over, on this rank and on others.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

_ERROR = re.compile(r"HBM MULTI BIT ECC", re.IGNORECASE)
# torch-npu 2.14 says "time is <us>", what MindIO looks for is "time us=<us>". Other errors that are
# told with it have times of their own, in units of their own.
_TIME = re.compile(_ERROR.pattern + r"[^\n]*?time (?:is|us\s*=)\s*(\d+)", re.IGNORECASE)
_KEPT = 1024  # updates; an error is not told later than so many


class UpdateTimes:
    """When the updates began that led to this rank's state: (steps finished by it, microseconds).

    clock_us: the clock that errors are told in.
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._began: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._least: int | None = None  # nothing that this process has done is in an older state

    def begin(self, step: int) -> None:
        """The update begins that finishes step `step`, or another optimizer's part of it."""
        self._drop_from(step)
        self._began.append((step, self._clock_us()))

    def at(self, step: int) -> None:
        """The rank has the state of `step`: its own, without any update, or from elsewhere."""
        self._drop_from(step + 1)
        self._least = step if self._least is None else min(step, self._least)
        if not self._began or self._began[-1][0] < step:
            self._began.append((step, self._clock_us()))

    def _drop_from(self, step: int) -> None:
        while self._began and self._began[-1][0] >= step:
            self._began.pop()

    def clean_after(self, error: BaseException) -> int | None:
        """The newest step that is right for sure; None: the error spoils nothing that was done.

        That may be the newest of this rank; a peer may have done one more with its gradients.
        """
        text = str(error)
        if not _ERROR.search(text) or not self._began:
            return None
        told = [int(found) for found in _TIME.findall(text)]
        if told:
            right = [step for step, at_us in self._began if at_us < min(told)]
            newest = right[-1] if right else self._began[0][0] - 1
        else:
            newest = self._began[-1][0] - 1  # it may be older than the newest update
        return max(newest, self._least or 0)
