"""The files of records: where they are, when another one is begun, which of them age.

    <profiling folder>/<MINDX_TASK_ID, or default_task_id_<time>>/<rank>/<time>

Times in names are whole seconds since the epoch. The rules are TaskD's, as the seed of issue 7 and
its source give them.
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
AGED_SHARE = 5  # one of so many files goes when there is too much
KEPT_FILES = 3  # of a rank; as few do not age
MOST_READ = 64 * 1024 * 1024  # of a file at once; whoever writes more is ahead of who reads
LOOK_S = 60.0  # between two looks at how much there is


def records_folder(environment: Mapping[str, str], own: Path) -> Path:
    """Return the folder of all records: MindCluster's in its pods, else `own`."""
    return Path(FOLDER) if environment.get(ENV_TASK) else own


def task_folder(folder: Path, task_id: str, now: float) -> Path:
    """Return the folder of a task's records: of this id, or of none that is known."""
    return folder / (task_id or f"default_task_id_{int(now)}")


class RecordFiles:
    """The files of one rank, to be added to by one process. most_bytes: of one of them."""

    def __init__(self, folder: Path, most_bytes: int = RecordLimits().file_bytes) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._path = folder
        self._fd = -1
        self._bytes = 0
        self._slow = False

    def append(self, lines: bytes) -> None:
        """Add records to the newest file, or to a new one where that is full, or was removed.

        On network storage they are there when this returns. Raises OSError: they cannot be written.
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
        """Close the file; what is added later begins where this has ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_there(self) -> bool:
        """Whether it is still this file that has its name: somebody may have cleared the folder."""
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
        if self._bytes and not _ends_a_line(newest):  # whoever wrote there was killed meanwhile
            self._bytes += os.write(self._fd, b"\n")
        self._slow = is_network(self._folder)


def numbered(folder: Path) -> Iterator[Path]:
    """The files of a rank's folder whose names are numbers; others are somebody else's."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _NUMBER.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            yield path


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of a task's ranks; a link to elsewhere is none, nor is 007."""
    found = folder.iterdir() if folder.is_dir() else ()
    return {
        int(path.name): path
        for path in found
        if _NUMBER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    }


def lines_of(folder: Path) -> Iterator[bytes]:
    """The records of a rank, oldest file first; a file that ages meanwhile is passed over."""
    for path in sorted(numbered(folder), key=_number):
        try:
            with path.open("rb") as file:
                yield from file
        except FileNotFoundError:
            continue


class Follower:
    """Reads what is added to a rank's records from now on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        newest = max(numbered(folder), key=_number, default=None)
        self._name = _number(newest) if newest else -1
        self._at = _size(newest) if newest else 0
        self._rest = b""  # the beginning of a line

    def lines(self) -> list[bytes]:
        """Return the whole lines that were added since the last call. Raises OSError."""
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
    """Remove the oldest fifth of the files of each of our ranks if all records are too much.

    folder: of the profiling, with its tasks in it. own: ranks whose files are ours to remove. By
    their time of change; of as few as three none goes. Returns what was removed.
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
        if number not in ours or len(each) <= KEPT_FILES:
            continue
        each.sort(key=_changed)
        for file in each[: max(1, len(each) // AGED_SHARE)]:
            file.unlink(missing_ok=True)
            removed.append(file)
    return removed


_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


def is_network(folder: Path) -> bool:
    """Whether what is written there goes over a network, by the kind of its file system."""
    best, kind = "", ""
    path = str(folder.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mounted, sort, *_ = line.split(" ")
        at = mounted.replace("\\040", " ")
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best):
            best, kind = at, sort
    return kind.startswith(_NETWORK)


_NETWORK = ("nfs", "cifs", "smb", "lustre", "ceph", "glusterfs", "fuse.", "9p", "beegfs", "gpfs")


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
