"""Slow the devices of simulated hosts.

Python imports this file at its start if its folder is on PYTHONPATH. A test could also stop a real
process from time to time, but its delay would depend on the load of the machine.

`SLOW_HOSTS`: the names of the hosts.
`SLOW_S`: the additional seconds of each matrix product there.
`SLOW_FILE`: the file that must exist before products become slow; empty: they are always slow.
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
