"""Run jobs of Rekindle and of torchrun, and read the events that their ranks write."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
from _common import HERE, RANKS, clean_environment
from _progress import GATE

POLL_S = 0.02
END_S = 40.0
SLACK_S = 1.0  # two ranks' lines may be read in the wrong order within this time
HOME = "home"
JOB_ID = "benchmark"


@dataclass(frozen=True)
class Line:
    """One event of one rank."""

    rank: int
    event: str
    number: int
    incarnation: int
    at: float
    pid: int


class Job:
    """One launched job; the end of the `with` block ends it and all its processes."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: dict[str, str], ranks: int
    ) -> None:
        (folder / HOME).mkdir(parents=True)
        self.folder = folder
        self.ranks = ranks
        self.lines: list[Line] = []
        self._read = [0] * ranks
        self._output = (folder / "output").open("wb")
        self.started = time.time()
        self.process = psutil.Popen(
            [*command],
            env=environment,
            cwd=HERE,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    # ---- events of its ranks

    def poll(self) -> list[Line]:
        """Read the new events."""
        fresh: list[Line] = []
        for rank in range(self.ranks):
            path = self.folder / f"rank{rank}"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[rank] += len(whole)
            fresh += [_line(rank, line) for line in whole.decode().splitlines()]
        fresh.sort(key=lambda line: line.at)
        self.lines += fresh
        return fresh

    def first_after(
        self, event: str, *, incarnation: int = -1, since: float = 0.0
    ) -> dict[int, Line]:
        """Return each rank's first such event since a time, in this incarnation or a later one."""
        found: dict[int, Line] = {}
        for line in reversed(self.lines):
            if line.at < since - SLACK_S:
                break
            if line.event == event and line.incarnation >= incarnation and line.at >= since:
                found[line.rank] = line
        return found

    def wait_all(
        self,
        event: str,
        *,
        incarnation: int = -1,
        since: float = 0.0,
        limit_s: float = 60.0,
        ranks: Collection[int] = (),
    ) -> dict[int, Line] | None:
        """Wait until every rank has written such an event; None: too late, or the job ended.

        ranks: wait only for these ranks; empty: all.
        """
        wanted = set(ranks or range(self.ranks))
        deadline = time.monotonic() + limit_s
        while True:
            self.poll()
            found = self.first_after(event, incarnation=incarnation, since=since)
            if wanted <= found.keys():
                return found
            if time.monotonic() > deadline or self.process.poll() is not None:
                return None
            time.sleep(POLL_S)

    def wait_steps(self, count: int, limit_s: float = 60.0) -> bool:
        """Wait until every rank has done `count` steps from now; return whether that succeeded."""
        begin = time.time()
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.process.poll() is None:
            self.poll()
            done = [0] * self.ranks
            for line in reversed(self.lines):
                if line.at < begin:
                    break
                done[line.rank] += line.event == "step"
            if min(done) >= count:
                return True
            time.sleep(POLL_S)
        return False

    @property
    def incarnation(self) -> int:
        """The newest incarnation with a finished step."""
        return max((line.incarnation for line in self.lines if line.event == "step"), default=-1)

    def pid(self, rank: int) -> int:
        """Return the current process id of a rank."""
        return next(x.pid for x in reversed(self.lines) if x.rank == rank and x.event == "up")

    def output(self) -> str:
        """Return the last lines that launcher and ranks have printed."""
        text = (self.folder / "output").read_text(errors="replace")
        return "\n".join(text.splitlines()[-15:])

    # ---- control

    def ended(self, limit_s: float) -> bool:
        """Wait until the launcher ends; return whether it has ended in time."""
        with contextlib.suppress(psutil.TimeoutExpired):
            self.process.wait(limit_s)
            return True
        return False

    def slow(self) -> None:
        """Limit the job to one step per second, so that the other job can use the cores."""
        (self.folder / GATE).touch()

    def full_speed(self) -> None:
        """Remove the limit of slow()."""
        (self.folder / GATE).unlink(missing_ok=True)

    def end(self) -> None:
        """End the job: SIGTERM to its launcher, then SIGKILL to the remaining processes."""
        family = self.family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.ended(END_S)
        for process in family:
            if process.is_running():
                process.kill()
        psutil.wait_procs(family, timeout=5)
        self._output.close()

    def family(self) -> list[psutil.Process]:
        """Return the launcher and all its descendants."""
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _line(rank: int, text: str) -> Line:
    event, number, incarnation, at, pid = text.split()
    return Line(rank, event, int(number), int(incarnation), float(at), int(pid))


def rekindle(
    folder: Path,
    script: str,
    arguments: Sequence[object],
    extra: Sequence[str] = (),
    ranks: int = RANKS,
    nodes: int = 1,
) -> Job:
    """Run a script of this folder as the ranks of a Rekindle job, on simulated nodes."""
    command = [*_tool("rekindle", "rekindle.cli.main"), "run", "--nnodes", str(nodes)]
    command += ["--nproc-per-node", str(ranks // nodes), "--job-id", JOB_ID]
    command += [*extra, str(HERE / script), str(folder)]
    environment = clean_environment(folder / HOME)
    return Job([*command, *map(str, arguments)], folder, environment, ranks)


def torchrun(
    folder: Path, script: str, arguments: Sequence[object], extra: Sequence[str] = ()
) -> Job:
    """Run a script of this folder as the ranks of torchrun, on one node."""
    command = [*_tool("torchrun", "torch.distributed.run"), "--standalone"]
    command += ["--nproc-per-node", str(RANKS), *extra, str(HERE / script), str(folder)]
    environment = clean_environment(folder / HOME)
    # Otherwise torch 2.13 with gloo often does not recover after a restart: all attempts share one
    # store, and new ranks read the addresses of the ended ones.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return Job([*command, *map(str, arguments)], folder, environment, RANKS)


def torchft(folder: Path, arguments: Sequence[object]) -> Job:
    """Run _rank_torchft.py as the replica groups of torchft."""
    command = [sys.executable, str(HERE / "_torchft.py"), str(folder), *map(str, arguments)]
    return Job(command, folder, clean_environment(folder / HOME), RANKS)


def dlrover(folder: Path, arguments: Sequence[object]) -> Job:
    """Run _rank_plain.py as the ranks of dlrover-run, on one node."""
    command = [sys.executable, str(HERE / "_dlrover.py"), str(folder), *map(str, arguments)]
    return Job(command, folder, clean_environment(folder / HOME), RANKS)


def _tool(name: str, module: str) -> list[str]:
    """Return the console script next to this Python, as users start it, or else the module."""
    script = Path(sys.executable).parent / name
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-m", module]
