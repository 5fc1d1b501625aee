"""`rekindle run` in tests: real processes, a home folder for each test, and checks for leaks.

The modules `driver`, `simulated` and `settling` test the coordinator's state machine without
processes.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import psutil
from waiting import bound_s, wait_until

from rekindle import names
from rekindle.errors import UsageError
from rekindle.job.spec import Endpoint, bearer, job_directory
from rekindle.testing.handle import JobHandle

MODULES = {
    "coordinator": "coordinator.process",
    "agent": "agent.process",
    "fork server": "agent.fork_server_process",
}
_LOOK_S = 0.05  # seconds between two searches of all processes, each of which takes some ms


class Run(JobHandle):
    """One `rekindle` command.

    `out`, `err`: files with the output so far.
    `program`: a command that runs the `rekindle` command, such as a tracer; empty: none.
    `interpreter`: the Python executable.
    """

    def __init__(
        self,
        place: Place,
        arguments: Sequence[str],
        job_id: str,
        program: Sequence[str] = (),
        interpreter: str = sys.executable,
        **popen: Any,
    ) -> None:
        super().__init__(job_directory(job_id, at=place.home), limit_s=bound_s())
        self.place = place
        self.job_id = job_id
        number = len(place.runs)
        self.out, self.err = (place.folder / f"run{number}.{name}" for name in ("out", "err"))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            settings = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err} | popen
            self.process = subprocess.Popen(
                [*program, interpreter, "-m", "rekindle.cli.main", "run", *arguments],
                **{"cwd": place.folder, "env": place.environment()} | settings,
            )
        place.runs.append(self)

    # ---- output

    @property
    def stdout(self) -> str:
        return self.out.read_bytes().decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.err.read_bytes().decode(errors="replace")

    def story(self) -> str:
        """Return output and journal of the run, for the message of a failed assertion."""
        events = "\n".join(str(event)[:300] for event in self.events())
        return f"\n-- stdout\n{self.stdout}\n-- stderr\n{self.stderr}\n-- journal\n{events}"

    def log(self, rank: int, stream: str = "stdout", restart: int = 0) -> str:
        """Return the output of one rank from its log file."""
        folder = self.directory.path / names.LOGS_DIRECTORY / f"attempt_{restart}" / str(rank)
        return (folder / f"{stream}.log").read_bytes().decode(errors="replace")

    # ---- end of the run

    def has_ended(self) -> bool:
        """Return whether the command has ended."""
        return self.process.poll() is not None

    def end(self, status: int | None = None) -> Run:
        """Wait until the command and all its processes have ended.

        `status`: the expected exit status; None: any.
        """
        self.wait_until(self.has_ended, "the end of the run")
        self.place.wait_for_silence()
        if status is not None:
            assert self.process.returncode == status, self.story()
        return self

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for_output(self, rank: int, text: str) -> None:
        """Wait until a rank has printed a text."""

        def shown() -> bool:
            try:
                return text in self.log(rank)
            except FileNotFoundError:
                return False

        wait_until(shown, f"{text!r} of rank {rank}")

    # ---- processes of the run

    def endpoint(self) -> Endpoint:
        """Return the address of the coordinator, once it listens."""

        def announced() -> Endpoint | None:
            try:
                found = self.directory.endpoint()
            except (UsageError, msgspec.DecodeError):
                return None
            return found if found and found.pid else None

        return wait_until(announced, "the coordinator's endpoint")

    def only(self, module: str) -> psutil.Process:
        """Return the first process of the job that runs this module, once it exists."""
        return wait_until(lambda: self.all(module), f"a process of {module}")[0]

    def all(self, module: str) -> list[psutil.Process]:
        """Return the processes that run this module.

        Ranks do not count, although their name matches.
        """
        name = f"rekindle.{MODULES[module]}"
        found = [p for p in self.place.processes() if name in _cmdline(p)]
        if module == "fork server":
            return [p for p in found if _session(p) == p.ppid()]
        return found

    def forked(self) -> list[psutil.Process]:
        """Return the child processes of agents that lead a session: ranks, the store, a reserve."""
        agents = {agent.pid for agent in self.all("agent")}
        found = [p for p in self.place.processes() if _session(p) == p.pid]
        return [p for p in found if p.ppid() in agents]


class Place:
    """A folder with a home of jobs, and all processes that tests start there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        folder.mkdir(parents=True, exist_ok=True)
        # A path of a socket has at most 107 bytes, and sockets of DataLoader workers are in here.
        self.temporary = Path(tempfile.mkdtemp(prefix="place-"))
        self.runs: list[Run] = []

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        """Return the environment of processes that start here. It identifies them as such."""
        ours = {names.ENV_HOME: str(self.home), "TMPDIR": str(self.temporary)}
        return dict(os.environ) | ours | dict(more)

    def script(self, text: str, name: str = "train.py") -> str:
        """Write a script and return its name."""
        (self.folder / name).write_text(text, encoding="utf-8")
        return name

    def start(self, *arguments: str, job_id: str = "job", **popen: Any) -> Run:
        """Start `rekindle run`."""
        return Run(self, ["--job-id", job_id, *arguments], job_id, **popen)

    def start_quick(self, script: str, *options: str, job_id: str = "job", **popen: Any) -> Run:
        """Start `rekindle run` of a script without torch.

        This is faster, because no process imports torch.
        """
        program = ["--no-python", sys.executable, "-u", script]
        return self.start(*options, *program, job_id=job_id, **popen)

    def join(self, run: Run, *options: str, secret: str | None = None, spare: bool = False) -> Run:
        """Start the agent of node 1, or of a spare, as on another machine."""
        where = run.endpoint()
        assign_node_rank = ("--spare",) if spare else ("--node-rank", "1")
        known = run.directory.secret() if secret is None else secret
        return Run(
            self,
            ["--coordinator", f"{where.host}:{where.port}", *assign_node_rank, *options],
            run.job_id,
            env=self.environment({names.ENV_SECRET: known}),
        )

    # ---- remaining processes and files

    def processes(self) -> list[psutil.Process]:
        """Return the live processes that were started here, except the test process."""
        home = f"{names.ENV_HOME}={self.home}\0".encode()
        found = []
        for process in psutil.process_iter():
            if process.pid != os.getpid() and home in environ(process.pid):
                found.append(process)
        return found

    def wait_for_silence(self) -> None:
        """Wait until no process of this folder runs."""

        wait_until(
            lambda: not self.processes(),
            f"no process left, but there are {self.left()}",
            pause_s=_LOOK_S,
        )

    def left(self) -> list[str]:
        """Return a description of each process that still runs here."""
        return [f"{p.pid}: {' '.join(_cmdline(p))[-120:]}" for p in self.processes()]

    def close(self) -> None:
        """Kill remaining processes by their ids.

        Fail if a process, folder or shared memory is left.
        """
        left = self.left()
        for process in self.processes():
            _kill(process)
        for run in self.runs:
            run.process.wait(bound_s())
        assert not left, f"processes were left: {left}"
        assert not list(self.temporary.glob("rekindle-*")), "temporary folders were left"
        shutil.rmtree(self.temporary, ignore_errors=True)
        shared = [path.name for path in Path("/dev/shm").glob("*rekindle*")]
        assert not [name for name in shared if any(run.job_id in name for run in self.runs)]


def refuse_agent(where: Endpoint, secret: str) -> None:
    """Connect to a coordinator as an agent of another version. It writes a line about that."""
    headers = {"Authorization": bearer(secret), names.HEADER_WIRE: "99"}
    connection = http.client.HTTPConnection(where.host, where.port, timeout=bound_s())
    try:
        connection.request("GET", names.PATH_AGENT, headers=headers)
        assert connection.getresponse().status == HTTPStatus.UPGRADE_REQUIRED
    finally:
        connection.close()


def environ(pid: int) -> bytes:
    """Return the initial environment of a process; empty if it has ended or is not readable."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _cmdline(process: psutil.Process | None) -> list[str]:
    try:
        return process.cmdline() if process is not None else []
    except psutil.Error:
        return []


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
