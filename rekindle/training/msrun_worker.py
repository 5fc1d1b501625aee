"""Replace msrun's direct child by the script, and end the script when msrun ends.

msrun gives each worker its own session. So a signal that kills msrun would otherwise leave the
workers running, with their devices.
"""

from __future__ import annotations

import os
import sys

from rekindle.rank.program import die_with_parent

ENV_MSRUN = "REKINDLE_MSRUN"  # msrun's process
ENV_PATH = "REKINDLE_MSRUN_PATH"  # the user's PATH
# msrun's place in the job. MindSpore gives workers their own place (RANK_ID, MS_NODE_ID).
_OF_MSRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def main() -> None:
    """Execute the command in the arguments, with the user's PATH."""
    die_with_parent(int(os.environ[ENV_MSRUN]))
    for name in _OF_MSRUN:
        os.environ.pop(name, None)
    os.environ["PATH"] = os.environ.pop(ENV_PATH)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
