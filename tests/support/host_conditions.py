"""Set the faults of a simulated host."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from rekindle.agent.devices.tools import SimulatedCondition, condition_file


def set_condition(host: Path, condition: SimulatedCondition) -> None:
    """Set the faults of a host. Kill its agent if the host is broken.

    `host`: the file of the host.
    """
    host.parent.mkdir(parents=True, exist_ok=True)
    path = condition_file(host)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(condition))
    fresh.replace(path)
    if condition.broken:
        for pid in _holders(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _holders(host: Path) -> Iterator[int]:
    """Yield the ids of processes that have the host's file open. Only its agent opens it."""
    if not host.exists():
        return
    wanted = host.stat()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            for each in Path(f"/proc/{process.pid}/fd").iterdir():
                found = each.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    yield process.pid
                    break
