"""Ctrl-C, SIGTERM and other signals end the job, and no process remains."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from jobs import Place, Run
from waiting import wait_until

from rekindle import names
from rekindle.coordinator.machine.endings import STOP_GRACE_S
from rekindle.recovery.journal import journal

# Prints that it runs, has a child process, and cleans up on SIGTERM. print() without a buffer makes
# two calls, and a signal could arrive between a line and its end.
POLITE = """
import os, signal, subprocess, sys, time

def clean_up(number, frame):
    print("cleans up")
    sys.exit(0)

signal.signal(signal.SIGTERM, clean_up)
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: print("hears", number))
subprocess.Popen(["sleep", "600"])
os.write(1, b"runs\\n")
time.sleep(600)
"""
TICK_S = 0.05
# Does not end on SIGTERM.
STUBBORN = f"""
import signal, time

signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
print("runs", flush=True)
while True:
    time.sleep({TICK_S})
    print("tick", flush=True)
"""


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_ends_the_job_in_peace(place: Place, number: str, status: int) -> None:
    """Ranks can clean up, their children end with them, and the exit status has the signal.

    A terminal sends the signal to the launcher's process group. Ranks get one signal, from their
    agent.
    """
    options = ("--nnodes", "2", "--nproc-per-node", "2")
    run = place.start_quick(place.script(POLITE), *options, start_new_session=True)
    for rank in range(4):
        run.wait_for_output(rank, "runs")
    os.killpg(run.process.pid, signal.Signals[number])
    run.end(status)
    assert run.stdout.count("cleans up") == 4
    for rank in range(4):
        assert run.log(rank) == "runs\ncleans up\n"
    assert run.events_of(journal.Ended)[-1].outcome == "stopped"
    assert "the job failed" not in run.stderr
    assert not journal.incidents(run.events())


def test_the_second_signal_ends_at_once(place: Place) -> None:
    """The second Ctrl-C kills a script that ignores SIGTERM, long before the grace period ends.

    The test measures time by the ranks' own ticks: a busy machine slows the ticks and the job.
    """
    run = place.start_quick(place.script(STUBBORN), "--nproc-per-node", "2")
    for rank in (0, 1):
        run.wait_for_output(rank, "runs")
    run.signal(signal.SIGINT)
    for rank in (0, 1):
        run.wait_for_output(rank, "heard")
    run.signal(signal.SIGINT)
    run.end(130)
    for rank in (0, 1):
        assert run.log(rank).partition("heard")[2].count("tick") < 0.9 * STOP_GRACE_S / TICK_S


# Starts with the first file of the job; the time before it is Python's own start.
MOMENTS: dict[str, Callable[[Run], object]] = {
    "folder": lambda run: run.directory.path.exists(),
    "secret": lambda run: (run.directory.path / names.SECRET_FILE).exists(),
    "endpoint": lambda run: (run.directory.path / names.ENDPOINT_FILE).exists(),
    "coordinator": lambda run: run.all("coordinator"),
    "agent": lambda run: run.all("agent"),
    "journal": lambda run: run.events_of(journal.JobStarted),
    "node": lambda run: run.events_of(journal.NodeJoined),
    "logs": lambda run: list(run.directory.path.glob("logs/attempt_0/*")),
    "ranks": lambda run: run.events_of(journal.RanksStarted),
}


@pytest.mark.parametrize(
    ("kind", "moment"),
    [*(("quick", moment) for moment in MOMENTS), ("python", "node"), ("python", "logs")],
)
def test_a_signal_at_any_moment_of_the_start(place: Place, kind: str, moment: str) -> None:
    """Ctrl-C during the start ends the job in the same way, at each point of the start."""
    run = start(place, kind)
    wait_until(lambda: MOMENTS[moment](run), moment)
    run.signal(signal.SIGINT)
    run.end()
    # Until Rekindle has set its handlers, Python handles the signal and ends by it.
    assert run.process.returncode in (130, -signal.SIGINT), run.story()
    outcomes = {event.outcome for event in run.events_of(journal.Ended)}
    assert outcomes == ({"stopped"} if run.events_of(journal.JobStarted) else set())


def start(place: Place, kind: str) -> Run:
    """Start three ranks that do not end on their own."""
    script = place.script("import time\nprint('runs')\ntime.sleep(600)\n")
    if kind == "quick":
        return place.start_quick(script, "--nproc-per-node", "3")
    return place.start("--nproc-per-node", "3", script)
