"""Manage the files of records: their paths, the start of a new file, the removal of old files.

    <profiling folder>/<MINDX_TASK_ID, or default_task_id_<time>>/<rank>/<time>

Times in names are seconds since the epoch, as integers. The rules are those of TaskD, from its
source.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rekindle.profiling.switch import RecordLimits

FOLDER = "/user/cluster-info/profiling"
ENV_TASK = "MINDX_TASK_ID"
AGED_SHARE = 5  # if the records are too large, one of this number of files is removed
# the most that one call reads of a file; a faster writer gets ahead of its reader
MOST_READ = 64 * 1024 * 1024
LOOK_S = 60.0  # interval of checks of the total size
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "glusterfs", "fuse.", "9p", "beegfs", "gpfs")


def records_folder(environment: Mapping[str, str], own: Path) -> Path:
    """Return the folder of all records: MindCluster's in its pods, otherwise `own`."""
    return Path(FOLDER) if environment.get(ENV_TASK) else own


def task_folder(folder: Path, task_id: str, now: float) -> Path:
    """Return the folder of a task's records, by its id or, without one, by the time."""
    return folder / (task_id or f"default_task_id_{int(now)}")


class RecordFiles:
    """Write the files of one rank, from one process. `most_bytes` is the limit of a file."""

    def __init__(self, folder: Path, most_bytes: int = RecordLimits().file_bytes) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._path = folder
        self._fd = -1
        self._bytes = 0
        self._slow = False

    def append(self, lines: bytes) -> None:
        """Append records to the newest file, or to a new file if that is full or was removed.

        On network storage the records are on disk when this returns. Raises OSError: the file is
        not writable.
        """
        if self._fd < 0 or self._bytes > self._most_bytes or not self._is_there():
            self._open()
        view = memoryview(lines)
        while view:
            wrote = os.write(self._fd, view)
            view = view[wrote:]
            self._bytes += wrote
        if self._slow:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a later append continues at its end."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_there(self) -> bool:
        """Return whether the path still names this file; a user may have cleared the folder."""
        try:
            named, ours = self._path.lstat(), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)

    def _open(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        newest = max(numbered(self._folder), key=_number, default=None)
        if newest is None or newest.stat().st_size > self._most_bytes:
            number = max(int(time.time()), _number(newest) + 1 if newest else 0)
            newest = self._folder / str(number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path, self._fd = newest, os.open(newest, flags, 0o644)
        self._bytes = os.fstat(self._fd).st_size
        # the previous writer was killed during a write
        if self._bytes and not _ends_a_line(newest):
            self._bytes += os.write(self._fd, b"\n")
        self._slow = is_network(self._folder)


def numbered(folder: Path) -> Iterator[Path]:
    """Yield the files of a rank's folder whose names are numbers; other files are not records."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _NUMBER.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            yield path


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of a task's ranks, without links and without names such as 007."""
    found = folder.iterdir() if folder.is_dir() else ()
    return {
        int(path.name): path
        for path in found
        if _NUMBER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    }


def lines_of(folder: Path) -> Iterator[bytes]:
    """Yield the records of a rank, the oldest file first; skip a file that disappears."""
    for path in sorted(numbered(folder), key=_number):
        try:
            with path.open("rb") as file:
                yield from file
        except FileNotFoundError:
            continue


class Follower:
    """Read new records of a rank, starting now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        newest = max(numbered(folder), key=_number, default=None)
        self._name = _number(newest) if newest else -1
        self._at = _size(newest) if newest else 0
        self._rest = b""  # the start of an incomplete line

    def lines(self) -> list[bytes]:
        """Return the complete lines since the last call. Raises OSError."""
        found = []
        for path in sorted(numbered(self._folder), key=_number):
            number = _number(path)
            if number < self._name:
                continue
            if number > self._name:
                self._name, self._at, self._rest = number, 0, b""
            try:
                with path.open("rb") as file:
                    file.seek(self._at)
                    data = file.read(MOST_READ)
            except FileNotFoundError:
                continue
            self._at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += lines
        return found


def age(folder: Path, own: Iterable[int], cap_bytes: int = RecordLimits().cap_bytes) -> list[Path]:
    """Remove the oldest fifth of the files of each own rank if all records exceed the limit.

    `folder` is the profiling folder with its tasks. `own` holds the ranks whose files this process
    may remove. The time of change determines the order. A rank with at most four files keeps all.
    Return the removed files.
    """
    ranks = {
        (task, number): path
        for task in (folder.iterdir() if folder.is_dir() else ())
        if task.is_dir() and not task.is_symlink()
        for number, path in rank_folders(task).items()
    }
    files = {place: list(numbered(path)) for place, path in ranks.items()}
    if sum(_size(file) for each in files.values() for file in each) <= cap_bytes:
        return []
    ours, removed = set(own), []
    for (_, number), each in files.items():
        if number not in ours:
            continue
        each.sort(key=_changed)
        for file in each[: len(each) // AGED_SHARE]:
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed


def is_network(folder: Path) -> bool:
    """Return whether writes to the folder use a network, by the type of its file system."""
    best, kind = "", ""
    path = str(folder.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mounted, sort, *_ = line.split(" ")
        at = mounted.replace("\\040", " ")
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best):
            best, kind = at, sort
    return kind.startswith(_NETWORK)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _number(path: Path) -> int:
    return int(path.name)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
