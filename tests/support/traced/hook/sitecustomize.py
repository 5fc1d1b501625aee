"""Record which functions of the package each process calls, and when.

Python imports this module at its start if its folder is on PYTHONPATH. A line is
`TIME PID FILE:LINE`, with the file below the package and the line of the function's `def`. Calls of
one function within `PACE_S` are one line. Forked processes write to the same file.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import CodeType, FrameType

PACE_S = 0.005
PACKAGE, OUT = os.environ["TRACED_PACKAGE"] + os.sep, os.environ["TRACED_OUT"]

_last: dict[CodeType, float] = {}


def _note(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
        return
    now = time.time()
    if now - _last.get(code, 0.0) < PACE_S:
        return
    _last[code] = now
    line = f"{now} {os.getpid()} {code.co_filename[len(PACKAGE) :]}:{code.co_firstlineno}\n"
    fd = os.open(OUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, line.encode())
    os.close(fd)


threading.setprofile(_note)
sys.setprofile(_note)
