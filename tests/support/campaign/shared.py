"""The parts that all trials of a run share: the undisturbed jobs, and the servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from training_jobs.baselines import recorded
from training_jobs.record import Record


class SharedParts(contextlib.ExitStack):
    """Undisturbed jobs and servers, each from its first use until the context ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._servers: dict[str, object] = {}
        self._start: dict[str, Callable[[Path], contextlib.AbstractContextManager[object]]] = {
            "s3": _s3,
            "prefect": _prefect,
        }

    def baseline(self, variant: str, ranks: int, steps: int) -> Record:
        """Return the record of an undisturbed job."""
        return recorded(self._folder, variant, ranks, steps)

    def server(self, name: str) -> object:
        """Return a server, which runs until the end of the context."""
        if name not in self._servers:
            folder = self._folder / name
            folder.mkdir()
            self._servers[name] = self.enter_context(self._start[name](folder))
        return self._servers[name]


def _s3(folder: Path) -> contextlib.AbstractContextManager[object]:
    from stores.servers import rclone

    return rclone(folder / "root")


def _prefect(folder: Path) -> contextlib.AbstractContextManager[object]:
    from prefect_side import free_port, server  # Prefect takes seconds to import

    return server(folder, free_port())
