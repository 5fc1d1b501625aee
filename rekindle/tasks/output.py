"""Show the output of agents and ranks in the log of the flow: of rank 0 always, of all in faults.

The log has only files of this machine. A thread reads them, because a file system may hang.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from rekindle.tasks.prefect_api import Log

_MOST_RANKS = 16  # whose output an incident shows
_LINES, _TAIL_BYTES = 5, 4_096  # of each log file
_PAUSE_S = 10.0  # between two records with new lines of rank 0
_MOST_LINES, _MOST_BYTES = 10, 8_192  # in such a record; Prefect stores each one
_STREAMS = ("stdout.log", "stderr.log")
_LEAVES_S = 2.0  # for the last lines at the end


class Output:
    """The output of a job's agents and ranks, for the log of its flow; use it as a context manager.

    directory: of the job. logs: the log folder of its ranks. restart: the number of restarts of all
    ranks so far.

    adopted: an earlier process of the flow has shown what is in the files.
    """

    def __init__(self, directory: Path, logs: Path, restart: int, log: Log, *, adopted: bool):
        self._directory, self._logs, self._log = directory, logs, log
        self._restart = restart
        self._read: dict[Path, int] = {}  # the bytes that the log has, for each file
        if adopted:
            self._read = {file: _size(file) for file in self._of_rank(0)}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rekindle-rank-0", daemon=True)

    def __enter__(self) -> Output:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Show the last lines of rank 0, unless the file system hangs."""
        self._closing.set()
        self._thread.join(_LEAVES_S)

    def restarted(self, restart: int) -> None:
        """Read the files of this restart, and no earlier ones."""
        self._restart = restart

    def show(self, *, agent: int | None, ranks: bool) -> None:
        """Log the last lines of a lost agent, and of all ranks."""
        files: dict[str, Path] = {}
        if agent is not None:
            files[f"agent {agent}"] = self._directory / f"agent-{agent}.log"
        if ranks:
            files |= {f"rank {rank}": self._of_rank(rank)[1] for rank in range(_MOST_RANKS)}

        def read() -> None:
            for name, file in files.items():
                if lines := last_lines(file):
                    self._log.warning("The last output of %s:\n%s", name, lines)

        threading.Thread(target=read, name="rekindle-output", daemon=True).start()

    def _of_rank(self, rank: int) -> list[Path]:
        folder = self._logs / f"attempt_{self._restart}" / str(rank)
        return [folder / stream for stream in _STREAMS]

    def _follow(self) -> None:
        while not self._closing.wait(_PAUSE_S):
            self._show_new()
        self._show_new()

    def _show_new(self) -> None:
        for file in self._of_rank(0):
            text, self._read[file] = new_lines(file, self._read.get(file, 0))
            if text:
                self._log.info("Rank 0, %s:\n%s", file.stem, text)


def new_lines(file: Path, read: int) -> tuple[str, int]:
    """Return the complete lines of a file after its first `read` bytes, and how far they go.

    The newest ten lines are enough. A file that this machine does not have is empty.
    """
    size = _size(file)
    if size <= read:
        return "", size
    try:
        with file.open("rb") as open_file:
            open_file.seek(since := max(read, size - _MOST_BYTES))
            data = open_file.read(size - since)
    except OSError:
        return "", read
    complete, newline, _ = data.rpartition(b"\n")
    if not newline and len(data) < _MOST_BYTES:
        return "", read  # the line continues
    lines = (complete if newline else data).decode(errors="replace").splitlines()
    end = since + len(complete) + len(newline) if newline else size
    left_out = since > read or len(lines) > _MOST_LINES
    text = "\n".join(lines[-_MOST_LINES:])
    return (f"(earlier lines are in {file})\n{text}" if left_out else text), end


def last_lines(file: Path) -> str:
    """Return the last lines of a file; empty: it has none, or this machine does not have it."""
    try:
        with file.open("rb") as open_file:
            open_file.seek(max(0, os.fstat(open_file.fileno()).st_size - _TAIL_BYTES))
            text = open_file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LINES:])


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
