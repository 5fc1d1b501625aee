"""What a run of the script has left: its steps' records, results and processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training_jobs import RANKS


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns


class Record:
    """The record of one run, read anew each time: the run may still go on."""

    def __init__(
        self, folder: Path, steps: int, metrics: Path | None = None, ranks: int = RANKS
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.total = steps
        self._metrics = metrics or folder / "job" / "metrics"

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """Return all records of a rank in the order in which they were written."""
        paths = [self._metrics / f"rank{rank}.jsonl"]
        # Of nodes with directories of their own.
        paths += (self.folder / "home").glob(f"jobs/*/nodes/*/metrics/rank{rank}.jsonl")
        written = [path for path in paths if path.exists()]
        text = "".join(path.read_text() for path in sorted(written, key=_changed))
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self, rank: int) -> dict[int, dict[str, Any]]:
        """Return the metrics of each step; of several records of a step the last one counts."""
        return {line["step"]: line["metrics"] for line in self.lines(rank)}

    def losses(self, rank: int) -> list[float]:
        """Return the losses in the order of the steps."""
        steps = self.steps(rank)
        return [steps[step]["loss"] for step in sorted(steps)]

    def result(self, rank: int) -> dict[str, Any]:
        """Return what the rank wrote at the end of the script; empty: it did not get there."""
        path = self.folder / f"result-{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def lives(self, rank: int) -> list[int]:
        """Return the pids of the rank's processes, the first one first."""
        return [int(path.read_text()) for path in self._processes(rank)]

    def births(self, rank: int) -> list[float]:
        """Return when the rank's processes began the script, in seconds since the epoch."""
        return [path.stat().st_mtime for path in self._processes(rank)]

    def _processes(self, rank: int) -> list[Path]:
        paths = (self.folder / "processes").glob(f"{rank}-*")
        return sorted(paths, key=lambda path: int(path.name.partition("-")[2]))
