"""The results of a run: the records of its steps, its final results, and its processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training_jobs import RANKS


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns


class Record:
    """The record of one run.

    Each call reads the files again, because the run can still continue.
    """

    def __init__(
        self, folder: Path, steps: int, metrics: Path | None = None, ranks: int = RANKS
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.total = steps
        self._metrics = metrics or folder / "job" / "metrics"

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """Return all records of a rank, in the order of writing."""
        paths = [self._metrics / f"rank{rank}.jsonl"]
        # The records of nodes with separate directories.
        paths += (self.folder / "home").glob(f"jobs/*/nodes/*/metrics/rank{rank}.jsonl")
        written = [path for path in paths if path.exists()]
        text = "".join(path.read_text() for path in sorted(written, key=_changed))
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self, rank: int) -> dict[int, dict[str, Any]]:
        """Return the metrics of each step. If a step has several records, the last one counts."""
        return {line["step"]: line["metrics"] for line in self.lines(rank)}

    def losses(self, rank: int) -> list[float]:
        """Return the losses in the order of the steps."""
        steps = self.steps(rank)
        return [steps[step]["loss"] for step in sorted(steps)]

    def result(self, rank: int) -> dict[str, Any]:
        """Return the result that the rank wrote at the end of the script; empty: it has none."""
        path = self.folder / f"result-{rank}.json"
        text = path.read_text() if path.exists() else ""
        return json.loads(text) if text else {}  # the rank makes the file before it writes it

    def lives(self, rank: int) -> list[int]:
        """Return the process ids of a rank, in the order of their starts."""
        return [int(path.read_text()) for path in self._processes(rank)]

    def births(self, rank: int) -> list[float]:
        """Return when the processes of a rank started the script, in seconds since the epoch."""
        return [path.stat().st_mtime for path in self._processes(rank)]

    def _processes(self, rank: int) -> list[Path]:
        paths = (self.folder / "processes").glob(f"{rank}-*")
        return sorted(paths, key=lambda path: int(path.name.partition("-")[2]))
