"""Find the process that a fault hits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import psutil
from training_jobs.record import Record

from campaign.faults import Victim
from campaign.launches import Launch


class Processes:
    """The processes of a job, by their kind."""

    def __init__(self, launch: Launch, record: Record) -> None:
        self._launch = launch
        self._record = record
        self._find: dict[Victim, Callable[[], list[psutil.Process]]] = {
            Victim.RANK: self.ranks,
            Victim.WORKER: self.workers,
            Victim.FORK_SERVER: self._fork_servers,
            Victim.STORE: self.stores,
            Victim.AGENT: lambda: [p for p in self._of("agent.process") if not _is_spare(p)],
            Victim.SPARE: lambda: [p for p in self._of("agent.process") if _is_spare(p)],
            Victim.COORDINATOR: lambda: self._of("coordinator.process"),
            Victim.LAUNCHER: self._steers,
            Victim.FLOW: self._steers,
        }

    def find(self, victim: Victim, number: int) -> psutil.Process | None:
        """Return one of the running processes of this kind; None: there is none now."""
        found = sorted(self._find[victim](), key=lambda p: p.pid)
        found = [process for process in found if is_running(process)]
        return found[number % len(found)] if found else None

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that run the script."""
        pids = [self._record.lives(rank)[-1:] for rank in range(self._record.ranks)]
        return [process for pid in pids for process in _processes(pid)]

    def workers(self) -> list[psutil.Process]:
        """Return the DataLoader workers of all ranks."""
        found = []
        for rank in self.ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                # A forked worker has the command line of its rank.
                found += [c for c in rank.children() if _cmdline(c) == _cmdline(rank)]
        return found

    def stores(self) -> list[psutil.Process]:
        """Return the processes that host the ranks' store: they listen, and run no script."""
        ranks = {process.pid for process in self.ranks()}
        agents = {process.pid for process in self._of("agent.process")}
        found = []
        for process in self._launch.place.processes():
            with contextlib.suppress(psutil.Error):
                forked = process.ppid() in agents and _session(process) == process.pid
                if forked and process.pid not in ranks and _listens(process):
                    found.append(process)
        return found

    def _steers(self) -> list[psutil.Process]:
        process = self._launch.steers()
        return [process] if process is not None else []

    def _of(self, module: str) -> list[psutil.Process]:
        return [p for p in self._launch.place.processes() if f"rekindle.{module}" in _cmdline(p)]

    def _fork_servers(self) -> list[psutil.Process]:
        """Return the fork servers. Ranks have the same command line, and lead sessions."""
        found = self._of("agent.fork_server_process")
        return [process for process in found if _session(process) != process.pid]


def is_running(process: psutil.Process) -> bool:
    """Return whether a process lives and is not stopped."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _is_spare(agent: psutil.Process) -> bool:
    return "--spare" in _cmdline(agent)


def _listens(process: psutil.Process) -> bool:
    return any(c.status == psutil.CONN_LISTEN for c in process.net_connections(kind="tcp"))


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _processes(pids: list[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found
