"""Lock the devices of this machine: the agents of a job hold them while they run.

A device is a name, such as `nvidia0`, with a file in the folder of all jobs. Each agent of a job
inherits a shared lock on the file, so the kernel frees the device after the last of them. The file
names the job. A job gets a device if it has it already, or if no agent holds it.

By default a job has all accelerators that its ranks can see, because a script may use any
of them. A machine without accelerators has no devices, and its jobs run beside each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rekindle import names
from rekindle.errors import DevicesHeldError
from rekindle.file_lock import locked

_GUARD = ".lock"  # of the folder; a device's name does not begin with a point
_DEVICES = Path("/dev")
_NVIDIA_FACTS = Path("/proc/driver/nvidia/gpus")


class _Kind(NamedTuple):
    """A kind of accelerators: the name of their files, and the variables that select some."""

    file: str
    variables: tuple[str, ...]


_KINDS = (
    _Kind("nvidia", ("CUDA_VISIBLE_DEVICES",)),
    _Kind("davinci", ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES")),
)


def visible_devices(
    environment: Mapping[str, str], *, files: Path = _DEVICES, facts: Path = _NVIDIA_FACTS
) -> list[str]:
    """Return the names of the accelerators that processes with this environment can see.

    files: the folder of the device files. facts: the folder in which the driver has the unique
    names of its devices.
    """
    found: list[str] = []
    for kind in _KINDS:
        present = _numbered(files, kind.file)
        chosen = [environment[each] for each in kind.variables if each in environment]
        if not chosen or not present:
            found += present
            continue
        for entry in filter(None, map(str.strip, chosen[0].split(","))):
            if entry == "-1":
                break  # the driver ignores all entries after it
            found.append(_named(entry, present, facts))
    return sorted(set(found))


def _numbered(folder: Path, stem: str) -> list[str]:
    pattern = re.compile(rf"{stem}(\d+)")
    matches = filter(None, (pattern.fullmatch(each.name) for each in folder.iterdir()))
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def _named(entry: str, present: Sequence[str], facts: Path) -> str:
    """Return the name of a device that a variable gives by its index or its unique name."""
    if entry.isdigit():
        return present[int(entry)] if int(entry) < len(present) else entry
    for file in facts.glob("*/information"):
        text = file.read_text()
        unique = re.search(r"GPU UUID:\s*(\S+)", text)
        minor = re.search(r"Device Minor:\s*(\d+)", text)
        if unique and minor and unique[1].startswith(entry):
            return f"nvidia{minor[1]}"
    return re.sub(r"[^A-Za-z0-9._-]", "-", entry)  # a part of a device has a lock of its own


class JobDevices:
    """The devices of one job on this machine."""

    def __init__(self, home: Path, job_id: str, devices: Sequence[str]) -> None:
        self._folder = home / names.DEVICES_DIRECTORY
        self._job_id = job_id
        self._devices = sorted(set(devices))

    @contextlib.contextmanager
    def held(self) -> Iterator[list[int]]:
        """Hold all devices; yield their open files, for the processes that shall hold them too.

        Raises DevicesHeldError: another job holds one of them. This process then holds none.
        """
        if not self._devices:
            yield []
            return
        with contextlib.ExitStack() as handles:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / _GUARD):
                held = [self._take(name, handles) for name in self._devices]
            yield held

    def _take(self, name: str, handles: contextlib.ExitStack) -> int:
        handle = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        handles.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 1000, 0).decode()
            if holder != self._job_id:
                raise DevicesHeldError(
                    f"job {self._job_id} waits for the device {name}, which job {holder} holds"
                ) from None
        else:
            os.ftruncate(handle, 0)
            os.pwrite(handle, self._job_id.encode(), 0)
        # All holders are agents of this job, and the guard excludes other processes.
        fcntl.flock(handle, fcntl.LOCK_SH)
        return handle
