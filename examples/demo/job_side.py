"""Observe a job in the demo: follow its steps, and kill parts of it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from place import OUTPUT
from prefect_side import until

from rekindle.engines.client import JobClient
from rekindle.protocol.http_views import JobView
from rekindle.recovery.journal.journal import FirstStep, Incident, JobStarted, incidents
from rekindle.tasks import job_access as jobs

JOBS = OUTPUT / "rekindle" / "jobs"
SHARED_MEMORY = Path("/dev/shm")
_STEP_S = 120.0


class Target:
    """One job, from the view of another process."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.directory = jobs.directory_of(job_id).path

    def status(self) -> JobView:
        """Return the job's state from the coordinator."""
        endpoint = until(
            lambda: jobs.coordinator_of(self.job_id), "the coordinator answers", _STEP_S
        )
        return JobClient(endpoint, jobs.directory_of(self.job_id).secret()).status()

    def steps(self, rank: int = 0) -> int:
        """Return the steps that a rank has finished, from its metrics file."""
        path = self.directory / "metrics" / f"rank{rank}.jsonl"
        lines = _tail(path).splitlines()
        return 1 + _step_of(lines[-1]) if lines else 0

    def has_begun(self) -> bool:
        """Return whether the first step was finished."""
        return any(isinstance(event, FirstStep) for event in jobs.history_of(self.job_id))

    def incidents(self) -> list[Incident]:
        """Return all incidents so far."""
        return incidents(jobs.history_of(self.job_id))

    def attempts(self) -> int:
        """Return how often the job was placed."""
        return sum(isinstance(event, JobStarted) for event in jobs.history_of(self.job_id))

    def steered_by(self) -> int:
        """Return the process that holds the lease, as the coordinator reports it; 0: none."""
        match = re.search(r"process (\d+) on ", self.status().holder)
        return int(match[1]) if match else 0

    def kill_rank(self, rank: int) -> float:
        """Send SIGKILL to a rank; return the time."""
        pid = self.status().ranks[rank].pid
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at

    def kill_node(self, node: int) -> float:
        """Send SIGKILL to a node's agent and all its descendants; return the time."""
        agent = next(n.pid for n in self.status().nodes if n.node == node)
        doomed = [psutil.Process(agent), *psutil.Process(agent).children(recursive=True)]
        at = time.time()
        for process in doomed:
            process.kill()
        return at


@contextmanager
def ending_jobs() -> Iterator[None]:
    """End all processes of the demo after an error in the block: jobs would outlive the demo."""
    try:
        yield
    except BaseException:
        print("Broken off; ending what was started", flush=True)
        # Repeat until none is left: an ending process may have started another one just before.
        while found := _processes():
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=1.0)
        raise


def leftovers() -> list[str]:
    """Return the live processes and shared memory of the demo's jobs."""
    processes = [
        f"process {process.pid}: {' '.join(process.cmdline())}"
        for process in _processes()
        if any(str(JOBS) in word for word in process.cmdline())
        or "REKINDLE_JOB_ID" in process.environ()
    ]
    # Rekindle's shared memory has no name and ends with its processes; this check proves it.
    return processes + [str(path) for path in SHARED_MEMORY.glob("*rekindle*")]


def _processes() -> list[psutil.Process]:
    """Return all processes that the demo has started, directly or indirectly."""
    home, found = os.environ["REKINDLE_HOME"], []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or belongs to another user
            if process.pid != os.getpid() and process.environ().get("REKINDLE_HOME") == home:
                found.append(process)
    return found


def _tail(path: Path) -> bytes:
    """Return the last complete lines of a growing file; b"" if it does not exist yet."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
        return file.read().rpartition(b"\n")[0]


def _step_of(line: bytes) -> int:
    step: int = json.loads(line)["step"]
    return step
