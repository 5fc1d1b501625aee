"""A run of a training script under test, and its report."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rekindle import names
from rekindle.job.spec import job_directory
from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.journal import journal
from rekindle.reporting.step_records import StepRecord
from rekindle.testing.handle import JobHandle, RunError

__all__ = ["KINDS", "JobHandle", "Report", "Run", "RunError"]

KINDS = tuple(kind.value for kind in InjectionKind)  # for pytest.mark.parametrize

_JOB = "test"
_STOP_S = 15.0  # longer than the job's own grace of 10 s


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run.

    exit_status: the status of `rekindle run`. outcome: succeeded, failed or stopped.
    finished: the number of steps.
    incidents: each has its cause, strategies, steps_lost and times.
    records: the values that the script has logged, by rank and step. If a step was repeated,
        its newest record counts.
    processes: the number of processes that each rank has had.
    """

    exit_status: int
    outcome: str
    reason: str
    finished: int
    incidents: list[journal.Incident]
    records: dict[int, dict[int, StepRecord]]
    processes: dict[int, int]

    @property
    def succeeded(self) -> bool:
        """Whether the training ended well."""
        return self.outcome == journal.SUCCEEDED

    def values(self, name: str, rank: int = 0) -> list[Any]:
        """Return one logged value of a rank, by step. Raises KeyError: a step has not logged it."""
        return [record.metrics[name] for record in self.records[rank].values()]


class Run(JobHandle):
    """`rekindle run` of a script, with its own job directory.

    folder: for all files of the run. options: options of `rekindle run` by name; True stands for a
    flag.
    """

    def __init__(
        self, folder: Path, script: str, arguments: Sequence[str], options: Mapping[str, object]
    ) -> None:
        folder.mkdir(parents=True)
        super().__init__(job_directory(_JOB, at=folder / "home"))
        options = dict(options)
        self._output = folder / "output.log"
        command = [sys.executable, "-m", "rekindle.cli.main", "run", "--allow-injection"]
        command += ["--job-id", _JOB]
        working_directory = options.pop("working_directory", None)
        command += [word for name, value in options.items() for word in _option(name, value)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, script, *arguments],
                cwd=str(working_directory) if working_directory else None,
                env={**os.environ, names.ENV_HOME: str(folder / "home")},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def output(self) -> str:
        """The text that launcher and ranks have printed so far."""
        return self._output.read_text(errors="replace")

    def has_ended(self) -> bool:
        """Return whether the command has ended."""
        return self._process.poll() is not None

    def story(self) -> str:
        """Return the last lines of journal, logs and output, for the message of a failed test."""
        return f"{super().story()}\n---- output\n{self.output[-4000:]}"

    def wait(self, *, timeout_s: float = 300.0) -> Report:
        """Wait for the end of the run, and return its report. Raises RunError: it does not end."""
        self.wait_until(self.has_ended, "the end of the run", timeout_s)
        status = self._process.wait()
        ended = self.events_of(journal.Ended)
        if not ended:
            raise RunError(
                f"the run ended with status {status}, and its journal has no end\n{self.story()}"
            )
        started = [rank for event in self.events_of(journal.RanksStarted) for rank in event.ranks]
        return Report(
            exit_status=status,
            outcome=ended[-1].outcome,
            reason=ended[-1].reason,
            finished=ended[-1].finished,
            incidents=self.incidents(),
            records=self.records(),
            processes=dict(Counter(started)),
        )

    def stop(self) -> None:
        """Ask the job to end, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End the run if it still runs; no process of it remains."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._process.kill()
        self._process.wait()


def _option(name: str, value: object) -> list[str]:
    spelt = f"--{name.replace('_', '-')}"
    return [spelt] if value is True else [spelt, str(value)]
