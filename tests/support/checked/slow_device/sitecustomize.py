"""Python starts with this where its folder is on PYTHONPATH: simulated hosts' devices are slow.

A real process that is merely stopped now and then is slow only by the mercy of a busy machine's
scheduler. SLOW_HOSTS names the hosts, SLOW_S the seconds that a product takes longer there, if
SLOW_FILE is no file that does not exist (yet).
"""

import os
import time
from pathlib import Path


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _is_forkserver_of(hosts: list[str]) -> bool:
    agent = any(Path(word).name in hosts for word in _words(os.getppid()))
    return agent and "rekindle.agent.fork_server_process" in _words(os.getpid())


if _is_forkserver_of(os.environ["SLOW_HOSTS"].split()):
    import torch

    fast = torch.mm

    seconds, begins = float(os.environ["SLOW_S"]), Path(os.environ["SLOW_FILE"] or "/")

    def mm(*args: object, **more: object) -> torch.Tensor:
        if begins.exists():
            time.sleep(seconds)
        return fast(*args, **more)

    torch.mm = mm
