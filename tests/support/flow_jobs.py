"""A job with a Session that the train flow runs, with a script of the flow tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
from prefect_side import Served
from repository import ROOT

from rekindle.recovery.journal.journal import Event, FirstStep, JobStarted

SCRIPTS = ROOT / "tests" / "integration" / "flow" / "scripts"


class TrainingRun:
    """A flow run whose job trains slowly. Its last step waits until the file `gate` exists."""

    def __init__(self, runner: Served, gate: Path, steps: int = 1200, **job: Any) -> None:
        self.runner, self.gate = runner, gate
        self._begun = 0
        self.run = runner.start(
            script=str(SCRIPTS / "steps.py"),
            arguments=[str(gate), str(steps)],
            environment={"OMP_NUM_THREADS": "1"},
            **job,
        )
        self.until_training()

    def until_training(self) -> None:
        """Wait until one more generation has finished its first step."""
        self._begun += 1
        self.run.until(lambda: self.run.count(FirstStep) >= self._begun, "the job trains")

    def newest(self, kind: type[Event]) -> Any:
        """Return the job's newest event of a kind."""
        return next(e for e in reversed(self.run.history()) if isinstance(e, kind))

    def coordinator(self) -> int:
        """Return the process id of the job's coordinator."""
        endpoint = self.run.directory.endpoint()
        return endpoint.pid if endpoint else self.newest(JobStarted).pid


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, as the failure of a node does."""
    top = psutil.Process(pid)
    for one in (top, *top.children(recursive=True)):
        one.kill()
