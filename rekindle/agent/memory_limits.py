"""Measures the memory that this process can still take before the kernel's OOM killer ends it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc/self")


def available_bytes(root: Path = ROOT, proc: Path = PROC) -> int:
    """Return the bytes that this process can take before an OOM kill; cached files count."""
    left = (_left(folder) for folder in memory_cgroups(root, proc))
    return min([psutil.virtual_memory().available, *(each for each in left if each is not None)])


def memory_cgroups(root: Path = ROOT, proc: Path = PROC) -> list[Path]:
    """Return the folders of the cgroups that limit this process's memory, its own first.

    A container sees only some cgroups above its own, or none; then its own is the root.
    root: where the cgroup file systems are mounted.
    """
    folders: list[Path] = []
    for line in read_lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted = root / "memory" if controllers else root  # cgroup v1, or v2
        own = mounted / os.path.normpath(path).lstrip("/")
        folders += [each for each in (own, *own.parents) if each.is_relative_to(mounted)]
    return [folder for folder in folders if folder.is_dir()]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file; empty: the kernel lacks it, and its values are unknown."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _left(cgroup: Path) -> int | None:
    """Return the free bytes below the limit of a cgroup; None: it has no limit."""
    limit = _number(cgroup, "memory.max", "memory.limit_in_bytes")
    used = _number(cgroup, "memory.current", "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit - used + _cached(cgroup)


def _number(cgroup: Path, *names: str) -> int | None:
    """Return the number in the first of these files that has one; None: no file has one."""
    for name in names:
        try:
            return int((cgroup / name).read_text())
        except (OSError, ValueError):  # "max" means no limit
            continue
    return None


def _cached(cgroup: Path) -> int:
    """Return the bytes that the kernel can free, mainly of files; shared memory does not count."""
    stat = dict(line.split() for line in read_lines(cgroup / "memory.stat"))
    # In v1 the counts with "total" include the cgroups below, as the usage does.
    kinds = ("active_file", "inactive_file", "slab_reclaimable")
    return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)
