"""The jobs that the rows of the table run on, and those of `rekindle run`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import psutil
from jobs import Place, Run
from repository import SUPPORT
from training_jobs.processes import leads_session
from waiting import status_of, wait_until

from process_faults import Victim
from rekindle.testing.handle import JobHandle

SCRIPT = SUPPORT / "process_faults" / "script.py"
RANKS = 2  # one on each node
SNAPSHOT_EVERY, CHECKPOINT_EVERY = 5, 10  # steps
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Started(Protocol):
    """A job that runs the script, with its gates in `folder`."""

    folder: Path
    launches: int

    @property
    def handle(self) -> JobHandle:
        """The job, by its directory."""

    def begun(self, victim: Victim) -> None:
        """Wait until the victim's process has just begun."""

    def processes(self, victim: Victim) -> list[psutil.Process]:
        """Return the processes that get the signal."""

    def launch_again(self) -> None:
        """Launch the job again after the death of its launcher."""

    def new_coordinators(self) -> int:
        """Return how many coordinators replaced another one."""

    def end(self) -> None:
        """Wait for the success of the job, and until nothing of it is left."""

    def story(self) -> str:
        """Describe the job, for the message of a failed test."""


def rank_process(folder: Path, rank: int) -> psutil.Process:
    """Return the newest process of a rank that has begun the script."""
    return psutil.Process(int((folder / f"pid-{rank}").read_text()))


def digests(folder: Path) -> list[str]:
    """Return the digests of the trained model that the ranks have written."""
    return [(folder / f"digest-{rank}").read_text() for rank in range(RANKS)]


def undisturbed_digests(folder: Path) -> list[str]:
    """Return the digests of a job without a fault, which runs in this folder."""
    with Place(folder) as place:
        CommandJob(place).start().end()
        return digests(folder)


class CommandJob:
    """A job of `rekindle run`, which runs again after the death of its launcher.

    options: more options of the command.
    """

    def __init__(self, place: Place, *options: str) -> None:
        self.folder = place.folder
        self._options = options
        self._place = place
        self.launches = 0

    def start(self) -> CommandJob:
        """Launch the job, also for the second time."""
        self.launches += 1
        self.run: Run = self._place.start(
            *("--nnodes", str(RANKS), "--nproc-per-node", "1"),
            *("--snapshot-every", str(SNAPSHOT_EVERY), "--checkpoint-every", str(CHECKPOINT_EVERY)),
            *(*self._options, str(SCRIPT), str(self.folder)),
            env=self._place.environment(ENVIRONMENT),
        )
        return self

    @property
    def handle(self) -> JobHandle:
        return self.run

    def begun(self, victim: Victim) -> None:
        match victim:
            case Victim.LAUNCHER:
                pass
            case Victim.COORDINATOR:
                self.run.only("coordinator")
            case Victim.AGENT | Victim.ALL:
                wait_until(self._agent, "the agent of node 0")
            case _:
                wait_until(self._fork_server, "the fork server of node 0")

    def processes(self, victim: Victim) -> list[psutil.Process]:
        match victim:
            case Victim.LAUNCHER:
                return [psutil.Process(self.run.process.pid)]
            case Victim.COORDINATOR:
                return [self.run.only("coordinator")]
            case Victim.AGENT:
                return self._agent()
            case Victim.FORK_SERVER:
                return self._fork_server()
            case Victim.CONTROL:
                return [*self.run.all("coordinator"), *self.run.all("agent")]
            case Victim.STORE:
                return [wait_until(self._store, "the store")]
            case _:
                return self._place.processes()

    def _agent(self) -> list[psutil.Process]:
        return [a for a in self.run.all("agent") if "--node 0" in " ".join(a.cmdline())]

    def _fork_server(self) -> list[psutil.Process]:
        agents = {agent.pid for agent in self._agent()}
        return [server for server in self.run.all("fork server") if server.ppid() in agents]

    def _store(self) -> psutil.Process | None:
        ranks = {rank_process(self.folder, rank).pid for rank in range(RANKS)}
        for agent in self._agent():
            for child in agent.children():
                listens = [
                    c for c in child.net_connections("tcp") if c.status == psutil.CONN_LISTEN
                ]
                if child.pid not in ranks and leads_session(child) and listens:
                    return child
        return None

    def launch_again(self) -> None:
        status_of(self.run.process)
        self.start()

    def new_coordinators(self) -> int:
        return sum(run.stderr.count("a new coordinator replaces it") for run in self._place.runs)

    def end(self) -> None:
        self.run.end(0)

    def story(self) -> str:
        return "\n".join(run.story() for run in self._place.runs)
