"""SIGKILL of each process of a job: the job has the designed outcome, and no process remains."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import acts
import psutil
import pytest
from jobs import Place, Run
from waiting import wait_until

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

# Runs until a file exists, with a child that ignores SIGTERM, SIGINT and SIGHUP.
WAITS = """
import os, signal, subprocess, time

subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; sleep 600"])
print("runs", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print("goes")
"""


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def agent_of(run: Run, node: int) -> psutil.Process:
    """Return the agent that was started for a node."""
    return next(a for a in run.all("agent") if f"--node {node}" in " ".join(a.cmdline()))


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Victim:
    """A job of two ranks on each node that wait for `go`; `restarts` is its limit of restarts."""

    def __init__(self, place: Place, nodes: int, restarts: int, *, quick: bool) -> None:
        self.place = place
        self.size = 2 * nodes
        script = place.script(WAITS)
        options = ("--nnodes", str(nodes), "--nproc-per-node", "2")
        options += ("--max-restarts", str(restarts))
        self.run = place.start_quick(script, *options) if quick else place.start(*options, script)
        self.restart = 0
        self.until_runs()

    def until_runs(self) -> None:
        """Wait until all ranks run the script in the newest restart."""
        for rank in range(self.size):
            wait_until(lambda rank=rank: self._has_begun(rank), f"rank {rank}{self.run.story()}")

    def _has_begun(self, rank: int) -> bool:
        try:
            return f"runs {self.restart}" in self.run.log(rank, restart=self.restart)
        except FileNotFoundError:
            return False

    def ranks(self) -> set[int]:
        """Return the processes that agents have forked and that have children: the ranks."""
        return {process.pid for process in self.run.forked() if process.children()}


def a_coordinator_that_is_stopped(victim: Victim) -> None:
    """The launcher ends a coordinator that does not answer, and starts another one."""
    run, ranks = victim.run, victim.ranks()
    old, joined = run.only("coordinator"), len(run.events_of(journal.NodeJoined))
    old.suspend()
    run.wait_event(journal.NodeJoined, joined + 2)
    assert not alive(old)
    assert victim.ranks() == ranks
    assert f"(process {old.pid}) sent nothing for" in run.stderr


def the_coordinator(victim: Victim) -> None:
    """Another coordinator replaces a killed one, twice; ranks without a Session keep running."""
    run, ranks = victim.run, victim.ranks()
    assert len(ranks) == 4
    for count in (2, 3):
        kill(run.only("coordinator"))
        run.wait_event(journal.NodeJoined, 2 * count)
    assert victim.ranks() == ranks
    assert "a new coordinator replaces it" in run.stderr


def an_agent(victim: Victim) -> None:
    """If a restart is left, the launcher starts another agent, and all ranks restart."""
    run = victim.run
    kill(agent_of(run, 1))
    victim.restart += 1
    victim.until_runs()
    assert [event.node for event in run.events_of(journal.NodeWanted)] == [1]
    run.wait_event(journal.RanksStarted, 4)
    incident = journal.incidents(run.events())[-1]
    assert (incident.strategy, incident.closed) == (Strategy.RESTART, True)


def an_agent_without_a_restart_left(victim: Victim) -> None:
    """The ranks end with their agent; the job fails with the lost node in its message."""
    kill(agent_of(victim.run, 1))
    victim.run.end(1)
    assert "the job lost node 1 (127.0.0.1) with its agent and all its ranks" in victim.run.stderr


KILLED = [the_coordinator, a_coordinator_that_is_stopped, an_agent, an_agent_without_a_restart_left]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run one job of two nodes, and kill its processes one after the other."""
    with Place(tmp_path_factory.mktemp("killed") / "place") as place:
        yield acts.Played(KILLED, Victim(place, nodes=2, restarts=1, quick=True))


@pytest.mark.parametrize("act", acts.names(KILLED))
def test_a_process_is_killed(killed: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    killed.check(act)


def the_store(victim: Victim) -> None:
    """After the start the ranks keep running without the store."""
    ranks = victim.ranks()
    [store] = [p for p in victim.run.forked() if p.net_connections(kind="tcp")]
    kill(store)
    wait_until(lambda: not alive(store), "the store's end")
    assert victim.ranks() == ranks
    assert not journal.incidents(victim.run.events())


def the_fork_server(victim: Victim) -> None:
    """Running ranks continue without the fork server; a new one forks the next ranks."""
    run, ranks, before = victim.run, victim.ranks(), victim.run.only("fork server")
    kill(before)
    wait_until(lambda: not alive(before), "the fork server's end")
    assert victim.ranks() == ranks
    kill(psutil.Process(min(ranks)))
    victim.restart += 1
    victim.until_runs()
    assert run.only("fork server").pid != before.pid
    assert [event.strategy for event in run.events_of(journal.Decided)] == [Strategy.RESTART]


def the_job_succeeds(victim: Victim) -> None:
    """The ranks complete, and the job succeeds."""
    (victim.place.folder / "go").touch()
    victim.run.end(0)
    assert victim.run.stdout.count("goes") == victim.size


HELPERS = [the_store, the_fork_server, the_job_succeeds]


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run one job of Python ranks, and kill its helper processes."""
    with Place(tmp_path_factory.mktemp("helped") / "place") as place:
        yield acts.Played(HELPERS, Victim(place, nodes=1, restarts=1, quick=False))


@pytest.mark.parametrize("act", acts.names(HELPERS))
def test_a_helper_is_killed(helped: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    helped.check(act)


class Again:
    """A job in the foreground that runs again after each kill of its launcher."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.script = place.script(WAITS)
        self.attempt = -1
        self.start()

    def start(self) -> None:
        """Run the job again."""
        options = ("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3")
        self.run = self.place.start_quick(self.script, *options)

    def until_runs(self) -> None:
        """Wait until the ranks of the newest attempt run."""
        self.attempt += 1
        self.run.wait_event(journal.JobStarted, self.attempt + 1)
        started = 2 * (self.attempt + 1)
        self.run.wait_event(journal.RanksStarted, started)
        wait_until(lambda: self.run.stdout.count("runs") == 4, f"all ranks{self.run.story()}")


def the_launcher(again: Again) -> None:
    """A job in the foreground ends with its killed launcher; the journal has the reason."""
    again.until_runs()
    again.run.signal(signal.SIGKILL)
    again.run.end()
    ended = again.run.events_of(journal.Ended)[-1]
    assert (ended.outcome, ended.reason) == (
        "stopped",
        "the process that launched the job has ended",
    )


def the_launcher_and_an_agent(again: Again) -> None:
    """After a kill of the launcher and an agent, in either order, no process remains."""
    for agent_first in (True, False):
        again.start()
        again.until_runs()
        victims = [agent_of(again.run, 0), psutil.Process(again.run.process.pid)]
        for victim in victims if agent_first else reversed(victims):
            kill(victim)
        again.run.end()


def the_launcher_of_a_job_that_is_run_again_at_once(again: Again) -> None:
    """The next attempt waits for the end of the last one."""
    again.start()
    again.until_runs()
    again.run.signal(signal.SIGKILL)
    again.run.process.wait()
    again.start()
    again.until_runs()


def the_launcher_while_its_coordinator_is_held(again: Again) -> None:
    """A suspended coordinator does not lock the job id: the next launch ends it."""
    old = again.run.only("coordinator")
    old.suspend()
    again.run.signal(signal.SIGKILL)
    again.run.process.wait()
    (again.place.folder / "go").touch()
    again.start()
    again.run.end(0)
    assert not alive(old)
    assert again.run.stdout.count("goes") == 4


def no_launcher_any_more(again: Again) -> None:
    """The journal has all attempts, and no event twice.

    Each attempt has its end, except the one whose coordinator was suspended.
    """
    run = again.run
    attempts = [event.attempt for event in run.events_of(journal.JobStarted)]
    assert attempts == list(range(6))
    outcomes = [event.outcome for event in run.events_of(journal.Ended)]
    assert (outcomes[0], outcomes[-2:]) == ("stopped", ["stopped", "succeeded"])
    assert [event.seq for event in run.events()] == list(range(1, len(run.events()) + 1))


LAUNCHER = [
    the_launcher,
    the_launcher_and_an_agent,
    the_launcher_of_a_job_that_is_run_again_at_once,
    the_launcher_while_its_coordinator_is_held,
    no_launcher_any_more,
]


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run one job id six times."""
    with Place(tmp_path_factory.mktemp("again") / "place") as place:
        yield acts.Played(LAUNCHER, Again(place))


@pytest.mark.parametrize("act", acts.names(LAUNCHER))
def test_the_launcher_is_killed(again: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    again.check(act)


STARTED: dict[str, Callable[[Run], object]] = {
    "folder": lambda run: run.directory.path.exists(),
    "coordinator": lambda run: run.all("coordinator"),
    "agent": lambda run: run.all("agent"),
    "node": lambda run: run.events_of(journal.NodeJoined),
    "logs": lambda run: list(Path(run.directory.path).glob("logs/attempt_0/*")),
}


@pytest.mark.parametrize("moment", STARTED)
def test_the_launcher_is_killed_while_it_starts_the_job(place: Place, moment: str) -> None:
    """If the launcher is killed during the start of the job, no process remains."""
    run = place.start_quick(place.script(WAITS), "--nproc-per-node", "3")
    wait_until(lambda: STARTED[moment](run), moment)
    run.signal(signal.SIGKILL)
    run.end()


# Starts a process in a separate session, which starts another one; then the script ends.
AWAY = """
import subprocess

command = ["sh", "-c", "sleep 600 & echo runs; wait"]
helper = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
helper.stdout.readline()
"""


def test_helpers_in_a_session_of_their_own_end_with_the_job(place: Place) -> None:
    """The agent ends all descendants of a rank, in other sessions as well.

    The signals for a rank's session do not reach those.
    """
    place.start_quick(place.script(AWAY)).end(0)
