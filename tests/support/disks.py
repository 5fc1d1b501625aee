"""A small disk of its own for a job, which a test can fill. This needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

NEEDS_MOUNTS = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None,
    reason="a disk of its own needs root, and the command mount",
)
_PIECE = 4096


class Disk:
    """A file system with little space, in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filling = path / "filling"

    def fill(self) -> None:
        """Use up all space that is free now."""
        with self._filling.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * _PIECE)

    def free(self) -> None:
        """Give the space back."""
        self._filling.unlink()


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Disk]:
    """Mount a file system in memory, until the context ends."""
    path.mkdir(parents=True)
    options = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
