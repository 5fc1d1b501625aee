"""The processes of a training job: what starts them, what they bear, which of them live."""

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
MARK = "TRAINING_JOB_TEST"  # in the environment of every process of a job


def leads_session(process: psutil.Process) -> bool:
    """Whether a process leads a session, as ranks do."""
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def dead(process: psutil.Process) -> bool:
    """Whether a process has ended, be it collected or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def environment(mark: str) -> dict[str, str]:
    """Return what the ranks' environment needs: the way to the tests' packages, and a mark."""
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    # torch asks the name service who its store's peers are.
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RES_OPTIONS": "timeout:1 attempts:1",
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }


def marked_processes(mark: str) -> list[str]:
    """List the live processes whose environment bears the mark."""
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
            continue  # it has just ended
    return found


def rekindle_run(
    folder: Path, *arguments: str, mark: str, options: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start `rekindle run` of the script in a process group of its own, as a shell does."""
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
