"""Make the writes of a coordinator's journal hang while a file exists.

Python imports this module at its start if its folder is on PYTHONPATH. Only coordinators are
affected. They write their journal with os.pwrite, and nothing else.
"""

import os
import sys
import time
from pathlib import Path

PACE_S = 0.02

if "rekindle.coordinator.process" in sys.orig_argv:
    _pwrite = os.pwrite

    def _late(fd: int, data: bytes, offset: int) -> int:
        while Path(os.environ["HANGING_JOURNAL"]).exists():
            time.sleep(PACE_S)
        return _pwrite(fd, data, offset)

    os.pwrite = _late
