"""Run a command, and stop each agent that descends from it for moments, again and again.

A busy machine delays an agent in the same way, but rarely. So this finds tests, and code, that need
an agent to act at once:

`PYTHONPATH=tests/support python -m suite.starved pytest tests/integration/faults`

It leaves an agent alone while a test has stopped it.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections.abc import Iterator

import psutil

STOPPED_S = 0.12  # several steps of a job in the tests
PAUSE_S = 0.1  # the longest pause between two rounds
_AGENT = "rekindle.agent.process"


def main(command: list[str]) -> int:
    """Return the exit status of the command, after a line with the number of stops."""
    running = psutil.Popen(command)
    # The command handles these signals and ends. A terminal sends SIGINT to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: running.send_signal(number))
    stops = 0
    while running.poll() is None:
        for agent in agents(running):
            stops += stop_for_a_moment(agent)
        time.sleep(random.uniform(0, PAUSE_S))
    print(f"agents were stopped {stops} times", file=sys.stderr)
    return int(running.returncode)


def agents(command: psutil.Process) -> Iterator[psutil.Process]:
    """Yield the running agents among the processes that descend from `command`."""
    for process in command.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if _AGENT in process.cmdline() and process.status() != psutil.STATUS_STOPPED:
                yield process


def stop_for_a_moment(agent: psutil.Process) -> bool:
    """Return whether the agent was alive."""
    try:
        agent.suspend()
        time.sleep(STOPPED_S)
        agent.resume()
    except psutil.Error:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
