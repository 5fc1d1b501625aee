"""The processes of a training job: their start, their environment, and the search for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from repository import SUPPORT

from training_jobs import RANKS

SCRIPT = Path(__file__).with_name("train.py")
MARK = "TRAINING_JOB_TEST"  # a variable in the environment of each process of a job


def leads_session(process: psutil.Process) -> bool:
    """Return whether a process leads a session, as ranks do."""
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def dead(process: psutil.Process) -> bool:
    """Return whether a process has ended; a zombie process counts as ended."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def environment(mark: str) -> dict[str, str]:
    """Return environment variables of the ranks: the path of the tests' packages, and a mark."""
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    # torch resolves the names of its store's peers.
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RES_OPTIONS": "timeout:1 attempts:1",
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }


def marked_processes(mark: str) -> list[str]:
    """Return the live processes whose environment has the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{entry.name}: {command}")
        except OSError:
            continue  # the process has just ended
    return found


def rekindle_run(
    folder: Path, *arguments: str, mark: str, options: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start `rekindle run` of the script in its own session, as a shell does."""
    command = [sys.executable, "-m", "rekindle.cli.main", "run", "--job-id", "job", *options]
    command += ["--nproc-per-node", str(RANKS), str(SCRIPT), str(folder), *arguments]
    own = {"REKINDLE_HOME": str(folder / "home")}
    return subprocess.Popen(
        command,
        env={**os.environ, **environment(mark), **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
