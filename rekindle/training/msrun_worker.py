"""What msrun starts in a script's place: the script, which does not outlive msrun.

msrun gives each worker a session of its own, and whoever kills msrun would leave them behind, with
their devices.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
ENV_MSRUN = "REKINDLE_MSRUN"  # msrun's process
ENV_PATH = "REKINDLE_MSRUN_PATH"  # the user's
# They tell msrun's place in the job. Workers have theirs from MindSpore (RANK_ID, MS_NODE_ID).
_OF_MSRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def main() -> None:
    """Become what the arguments say, with the Python of whoever has started msrun."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ[ENV_MSRUN]):
        sys.exit("rekindle: msrun is gone")  # before it could take this process with it
    for name in _OF_MSRUN:
        os.environ.pop(name, None)
    os.environ["PATH"] = os.environ.pop(ENV_PATH)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
