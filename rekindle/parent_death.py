"""End this process when its parent dies. The kernel does it, so no death of the parent escapes."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def die_with_parent(parent: int) -> None:
    """Kill this process when its parent dies, also if the parent is dead already.

    parent: its process id, from before this process could lose it.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo die_with_parent()."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
