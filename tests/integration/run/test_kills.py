"""SIGKILL of each process of a job: the outcome is as designed, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from jobs import Place, Run, wait_until

from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy

# Runs until the test lets it go, with a child that ignores the signals of politeness.
WAITS = """
import os, signal, subprocess, time

subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; sleep 600"])
print("runs", os.environ["TORCHELASTIC_RESTART_COUNT"])
while not os.path.exists("go"):
    time.sleep(0.02)
print("goes")
"""


def waiting(place: Place, *options: str, nodes: int = 1, quick: bool = True) -> Run:
    """Start a job of two ranks per node that wait for `go`; return when all do."""
    script = place.script(WAITS)
    options = ("--nnodes", str(nodes), "--nproc-per-node", "2", *options)
    run = place.start_quick(script, *options) if quick else place.start(*options, script)
    for rank in range(2 * nodes):
        run.wait_for_output(rank, "runs")
    return run


def go(place: Place) -> None:
    """Let the ranks go on to their end."""
    (place.folder / "go").touch()


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def test_the_launcher_is_killed(place: Place) -> None:
    """A job in the foreground ends with its launcher, however that dies; its ledger says so."""
    run = waiting(place, nodes=2)
    run.signal(signal.SIGKILL)
    run.end()
    ended = run.recorded(journal.Ended)[-1]
    assert (ended.outcome, ended.reason) == (
        "stopped",
        "the process that launched the job is gone",
    )


STARTED: dict[str, Callable[[Run], object]] = {
    "folder": lambda run: run.directory.path.exists(),
    "coordinator": lambda run: run.all("coordinator"),
    "agent": lambda run: run.all("agent"),
    "node": lambda run: run.recorded(journal.NodeJoined),
    "logs": lambda run: list(run.directory.path.glob("logs/attempt_0/*")),
}


@pytest.mark.parametrize("moment", STARTED)
def test_the_launcher_is_killed_while_it_starts_the_job(place: Place, moment: str) -> None:
    """The same when only a part of the job's processes exists."""
    run = place.start_quick(place.script(WAITS), "--nproc-per-node", "3")
    wait_until(lambda: STARTED[moment](run), moment)
    run.signal(signal.SIGKILL)
    run.end()


def test_the_coordinator_is_killed(place: Place) -> None:
    """Another one takes its place; untouched ranks do not notice, and the job succeeds."""
    run = waiting(place, nodes=2)
    ranks = {process.pid for process in run.forked()}
    for count in (2, 3):
        kill(run.only("coordinator"))
        run.wait_for(journal.NodeJoined, 2 * count)
    assert {process.pid for process in run.forked()} == ranks
    go(place)
    run.end(0)
    assert "another one takes its place" in run.stderr
    assert run.stdout.count("goes") == 4


def test_the_zygote_is_killed(place: Place) -> None:
    """Running ranks do not notice; the next rank is forked from a new zygote."""
    run = waiting(place, "--max-restarts", "1", quick=False)
    kill(run.only("zygote"))
    rank = next(p for p in run.forked() if p.children())
    kill(rank)
    wait_until(lambda: Path(run.directory.path, "logs/attempt_1/1/stdout.log").exists(), "restart")
    run.only("zygote")
    go(place)
    run.end(0)
    assert [event.strategy for event in run.recorded(journal.Decided)] == [Strategy.RESTART]


def test_the_store_is_killed(place: Place) -> None:
    """Ranks that do not need the store any more go on to their end."""
    run = waiting(place, quick=False)
    stores = [p for p in run.forked() if p.net_connections(kind="tcp")]
    assert len(stores) == 1
    kill(stores[0])
    wait_until(lambda: not alive(stores[0]), "the store's end")
    go(place)
    run.end(0)
    assert not journal.incidents(run.events())


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_agent_is_killed(place: Place) -> None:
    """Its ranks die with it; without restarts the job fails, and the lost node is named."""
    run = waiting(place, nodes=2)
    agent = next(p for p in run.all("agent") if node_of(p) == 1)
    kill(agent)
    run.end(1)
    assert "node 1 (127.0.0.1) was lost with its agent and all its ranks" in run.stderr


def node_of(agent: psutil.Process) -> int:
    """The node rank that an agent was started for."""
    words = agent.cmdline()
    return int(words[words.index("--node") + 1])


def test_a_killed_agent_is_replaced(place: Place) -> None:
    """With a restart left the launcher brings another agent, and all ranks run again."""
    run = waiting(place, "--max-restarts", "1", nodes=2)
    kill(next(p for p in run.all("agent") if node_of(p) == 1))
    logs = Path(run.directory.path, "logs/attempt_1")
    wait_until(lambda: len(list(logs.glob("*/stdout.log"))) == 4, "four ranks again")
    go(place)
    run.end(0)
    assert [event.node for event in run.recorded(journal.NodeWanted)] == [1]
    [incident] = journal.incidents(run.events())
    assert (incident.strategy, incident.closed) == (Strategy.RESTART, True)


@pytest.mark.parametrize("order", ["agent first", "launcher first"])
def test_two_are_killed_at_once(place: Place, order: str) -> None:
    """Whatever dies together with the launcher, nobody is left to wait for anybody."""
    run = waiting(place, "--max-restarts", "3", nodes=2)
    victims = [run.all("agent")[0], psutil.Process(run.process.pid)]
    for victim in victims if order == "agent first" else reversed(victims):
        kill(victim)
    run.end()


def writers(run: Run) -> int:
    """How many coordinators have the job's ledger open."""
    ledger = str(run.directory.ledger)
    files = [file.path for each in run.all("coordinator") for file in each.open_files()]
    return files.count(ledger)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "old coordinator is held"])
def test_a_job_is_run_again_while_its_old_coordinator_still_lives(place: Place, late: bool) -> None:
    """The next attempt waits for the last one's end: two never write the same ledger."""
    run = waiting(place)
    old = run.only("coordinator")
    if late:
        old.suspend()
    run.signal(signal.SIGKILL)
    run.process.wait()
    go(place)
    again = place.start_quick("train.py")
    if late:
        wait_until(lambda: writers(again) == 2, "the second coordinator")
        old.resume()
    again.end(0)
    assert [event.attempt for event in again.recorded(journal.JobStarted)] == [0, 1]
    assert [event.outcome for event in again.recorded(journal.Ended)] == ["stopped", "succeeded"]
    assert [event.seq for event in again.events()] == list(range(1, len(again.events()) + 1))
