"""How much memory this process may still take, and whether the kernel killed for want of it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc/self")


def available_bytes(root: Path = ROOT, proc: Path = PROC) -> int:
    """What can be taken before the kernel has to kill: files that are cached are no hindrance."""
    left = (_left(folder) for folder in memory_cgroups(root, proc))
    return min([psutil.virtual_memory().available, *(each for each in left if each is not None)])


def memory_cgroups(root: Path = ROOT, proc: Path = PROC) -> list[Path]:
    """Folders of the cgroups that account for this process's memory, its own first.

    A container sees those above its own in part only, or none: its own is then the root.
    root: where the file systems of cgroups are mounted.
    """
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted = root / "memory" if controllers else root  # of cgroup v1, or of v2
        own = mounted / os.path.normpath(path).lstrip("/")
        folders += [each for each in (own, *own.parents) if each.is_relative_to(mounted)]
    return [folder for folder in folders if folder.is_dir()]


def _left(cgroup: Path) -> int | None:
    """Bytes below the limit of a cgroup; None: it has none."""
    limit = _number(cgroup, "memory.max", "memory.limit_in_bytes")
    used = _number(cgroup, "memory.current", "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit - used + _cached(cgroup)


def _number(cgroup: Path, *names: str) -> int | None:
    """What the first of these files holds that there is; None: none does, or no number."""
    for name in names:
        try:
            return int((cgroup / name).read_text())
        except (OSError, ValueError):  # "max" is no limit
            continue
    return None


def _cached(cgroup: Path) -> int:
    """Bytes that the kernel would give up, of files above all; shared memory is not among them."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines)
    # In v1 those with "total" include the cgroups below, as the usage does.
    kinds = ("active_file", "inactive_file", "slab_reclaimable")
    return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)


_FILES = "memory.events", "memory.oom_control"  # of cgroup v2, and of v1
_COUNT = "oom_kill"  # of a line, in both files; kills by any out-of-memory killer are counted

NEAR_S = 2.0  # between a kill and the end of the process, which gives its memory back first


class OomCounter:
    """Counts kills in the cgroup of this process; ranks are in the same one, unless they move.

    root: where the file systems of cgroups are mounted.
    """

    def __init__(
        self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self")
    ) -> None:
        own = memory_cgroups(root, proc)[:1]  # those above count strangers, too
        files = (folder / name for folder in own for name in _FILES)
        self._file = next((file for file in files if file.exists()), None)
        self._seen = self._read()
        self._risen_at = -NEAR_S

    def look(self, now: float) -> None:
        """Note whether the kernel has killed since the last time; to be called often."""
        before, self._seen = self._seen, self._read()
        if self._seen > before:
            self._risen_at = now

    def killed_lately(self, now: float) -> bool:
        """Whether whoever dies now of SIGKILL may have been killed for want of memory."""
        self.look(now)
        return now - self._risen_at < NEAR_S

    def _read(self) -> int:
        if self._file is None:
            return 0
        try:
            lines = self._file.read_text().splitlines()
        except OSError:  # a kernel without the controller; then nobody can tell
            return 0
        counts = (line.split() for line in lines)
        return next((int(words[1]) for words in counts if words[:1] == [_COUNT]), 0)
