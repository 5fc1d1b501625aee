"""A run of a training script under test, and what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rekindle import names
from rekindle.engines.client import JobClient
from rekindle.errors import JobError, RekindleError
from rekindle.recovery import journal
from rekindle.runtime.protocol import Inject, InjectionKind
from rekindle.runtime.spec import JobDirectory
from rekindle.tasks.metrics import StepRecord, effective, read_records

KINDS = tuple(kind.value for kind in InjectionKind)  # for pytest.mark.parametrize

_JOB = "test"
_STOP_S = 15.0  # the job's own grace is 10 s
_LOOK_S = 0.02


class RunError(RekindleError):
    """A run under test did not do what was waited for; the text ends with what it printed."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run.

    exit_status: of `rekindle run`. outcome: succeeded, failed or stopped. finished: steps.
    incidents: each with its cause, strategies, steps_lost and times. records: what the script has
    logged, by rank and step; of a step that was done again the record that counts. processes: how
    many each rank has had.
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
        return self.outcome == "succeeded"

    def values(self, name: str, rank: int = 0) -> list[Any]:
        """Return one logged value of a rank, by step. Raises KeyError: a step has not logged it."""
        return [record.metrics[name] for record in self.records[rank].values()]


class Run:
    """`rekindle run` of a script, with a job directory of its own.

    folder: where all of it is kept. options: of `rekindle run`, by name (True: a flag).
    """

    def __init__(
        self, folder: Path, script: str, arguments: Sequence[str], options: Mapping[str, object]
    ) -> None:
        folder.mkdir(parents=True)
        options = dict(options)
        self._output = folder / "output.log"
        self._directory = JobDirectory(folder / "home" / "jobs" / _JOB)
        command = [sys.executable, "-m", "rekindle.cli", "run", "--allow-injection"]
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
        """What launcher and ranks have printed so far."""
        return self._output.read_text(errors="replace")

    def events(self) -> list[journal.AnyEvent]:
        """Read the job's journal as far as it goes."""
        try:
            return journal.read(self._directory.ledger.read_bytes().splitlines())
        except FileNotFoundError:
            return []

    def inject(
        self,
        kind: InjectionKind | str,
        *,
        rank: int = 0,
        step: int | None = None,
        seconds: float = 1.0,
        timeout_s: float = 60.0,
    ) -> None:
        """Have a rank suffer a fault in `step`; given early, it waits for that step.

        Raises RunError: the step is past, there is no such rank, or the job does not answer.
        """
        order = Inject(rank=rank, kind=InjectionKind(kind), step=step, seconds=seconds)
        self.wait_until(self._answers, "the job's coordinator", timeout_s)
        try:
            self._client().inject(order)
        except JobError as error:
            raise RunError(f"{error}\n{self._tail()}") from error

    def wait_step(self, step: int, *, timeout_s: float = 120.0) -> None:
        """Wait until all ranks have finished so many steps."""
        self.wait_until(lambda: self._finished() >= step, f"{step} finished steps", timeout_s)

    def wait(self, *, timeout_s: float = 300.0) -> Report:
        """Wait for the run's end, and tell what became of it. Raises RunError: it does not end."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            text = f"the run has not ended within {timeout_s:g} s"
            raise RunError(f"{text}\n{self._tail()}") from error
        events = self.events()
        ended = [event for event in events if isinstance(event, journal.Ended)]
        if not ended:
            raise RunError(f"the run ended with status {status}, and no word\n{self._tail()}")
        started = [r for e in events if isinstance(e, journal.RanksStarted) for r in e.ranks]
        records = read_records(self._directory.path)
        return Report(
            exit_status=status,
            outcome=ended[-1].outcome,
            reason=ended[-1].reason,
            finished=ended[-1].finished,
            incidents=journal.incidents(events),
            records={rank: effective(lines) for rank, lines in records.items()},
            processes=dict(Counter(started)),
        )

    def stop(self) -> None:
        """Ask the job to end, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End the run, if it has not ended; nothing of it is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._process.kill()
        self._process.wait()

    def wait_until(self, true: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until something is true. Raises RunError: it takes too long, or the run ended."""
        deadline = time.monotonic() + timeout_s
        while not true():
            if self._process.poll() is not None:
                raise RunError(f"the run ended before {what} came\n{self._tail()}")
            if time.monotonic() > deadline:
                raise RunError(f"{what} did not come within {timeout_s:g} s\n{self._tail()}")
            time.sleep(_LOOK_S)

    def _client(self) -> JobClient:
        endpoint = self._directory.endpoint()
        if endpoint is None:
            raise JobError("the job was not launched yet")
        return JobClient(endpoint, self._directory.secret())

    def _answers(self) -> bool:
        try:
            self._client().status()
        except JobError:
            return False
        return True

    def _finished(self) -> int:
        try:
            return self._client().status().finished
        except JobError:
            return 0

    def _tail(self) -> str:
        return self.output[-4000:]


def _option(name: str, value: object) -> list[str]:
    spelt = f"--{name.replace('_', '-')}"
    return [spelt] if value is True else [spelt, str(value)]
