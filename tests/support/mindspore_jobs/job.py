"""A job of MindSpore: started in MindSpore's environment, and watched from here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from repository import ROOT, SUPPORT
from training_jobs.processes import MARK, marked_processes
from waiting import wait_until

from rekindle.engines.client import JobClient
from rekindle.recovery import journal
from rekindle.runtime.protocol import Inject, InjectionKind
from rekindle.runtime.spec import JobDirectory
from rekindle.runtime.view import JobView

# Where `make mindspore` puts MindSpore, or wherever else somebody has it.
PYTHON = Path(
    os.environ.get("REKINDLE_TEST_MINDSPORE") or ROOT / ".venv-mindspore" / "bin" / "python"
)
SCRIPT = Path(__file__).with_name("train.py")
TFT_SCRIPT = Path(__file__).with_name("tft_train.py")
STEPS = 30
LIMIT_S = 150.0  # the start of all ranks takes 10 s at rest, and 30 beside other tests

E = TypeVar("E", bound=journal.Event)
T = TypeVar("T")

needs_mindspore = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="MindSpore has no build for Python 3.13"
)


class MindSporeJob:
    """One job; a context manager that leaves nothing behind."""

    def __init__(
        self,
        folder: Path,
        *script: str,
        ranks: int = 2,
        options: tuple[str, ...] = (),
        program: Path = SCRIPT,
        environment: Mapping[str, str] | None = None,
    ):
        self._own = environment or {}
        self.folder, self.ranks, self.mark = folder, ranks, uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        self._command = [str(PYTHON), "-m", "rekindle.cli", "run", "--framework", "mindspore"]
        self._command += ["--nproc-per-node", str(ranks), "--job-id", "job", "--allow-injection"]
        self._command += [*options, str(program), str(folder), *script]
        self.home = folder / "home"
        self.directory = JobDirectory(self.home / "jobs" / "job")
        self._launcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MindSporeJob:
        return self.start()

    def start(self) -> MindSporeJob:
        """Launch the job, or its next attempt."""
        own = {"REKINDLE_HOME": str(self.home), MARK: self.mark, "GLOG_v": "3"}
        # The package under test, wherever the environment has another one from.
        paths = os.pathsep.join(map(str, (ROOT, SUPPORT)))
        environment = os.environ | own | {"PYTHONPATH": paths} | dict(self._own)
        with (self.folder / "output").open("ab") as output:
            self._launcher = subprocess.Popen(
                self._command, env=environment, stdout=output, stderr=output, cwd=self.folder
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._launcher is not None
        if self._launcher.poll() is None:
            self._launcher.terminate()
        self._launcher.wait(60)
        wait_until(lambda: not marked_processes(self.mark), "all processes of the job gone")

    def end(self) -> int:
        """Wait for the launcher's end; return its status."""
        assert self._launcher is not None
        launcher = self._launcher
        self.wait(lambda: launcher.poll() is not None, "the job's end")
        return launcher.returncode

    def wait(self, true: Callable[[], T], what: str) -> T:
        """Wait until `true()`."""
        try:
            return wait_until(true, what, LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def wait_event(self, kind: type[E], **fields: object) -> E:
        """Wait for an event of this kind."""

        def found() -> E | None:
            events = self.events_of(kind, **fields)
            ended = self._launcher is not None and self._launcher.poll() is not None
            assert events or not ended, f"ended before {kind.__name__}\n{self.story()}"
            return events[-1] if events else None

        return self.wait(found, f"{kind.__name__} {fields}")

    def wait_step(self, step: int) -> None:
        """Wait until all ranks have done so many steps."""
        self.wait(lambda: min(map(len, map(self.losses, range(self.ranks)))) >= step, f"{step}")

    def hold(self, step: int, *, between: bool = False) -> None:
        """Have all ranks stand behind so many steps, until they are released.

        between: before they get the next batch; else with it, before its graph runs.
        """
        (self.folder / f"{'rest' if between else 'pause'}-{step}").touch()

    def release(self, step: int) -> None:
        """Let them go on."""
        (self.folder / f"pause-{step}").unlink()

    def inject(self, rank: int, kind: InjectionKind, step: int) -> None:
        """Have a rank suffer a fault in a step, once all are training."""
        self.wait_event(journal.Restored)
        self.client().inject(Inject(rank=rank, kind=kind, step=step))

    def client(self) -> JobClient:
        """Return what asks the coordinator."""
        endpoint = self.wait(self.directory.endpoint, "a coordinator")
        return JobClient(endpoint, self.directory.secret())

    def status(self) -> JobView:
        """Ask the coordinator."""
        return self.client().status()

    def pids(self) -> list[int]:
        """Return the ranks' processes, once all train."""
        self.wait_event(journal.Restored)
        return [rank.pid for rank in self.status().ranks]

    def scheduler(self) -> psutil.Process:
        """Return MindSpore's scheduler; its log tells it from the ranks, which are forked alike."""
        for told in marked_processes(self.mark):
            process = psutil.Process(int(told.partition(":")[0]))
            if any("/scheduler_" in file.path for file in process.open_files()):
                return process
        raise AssertionError(f"no scheduler\n{self.story()}")

    # ---- what it has left

    def events(self) -> list[journal.AnyEvent]:
        """Read the ledger."""
        path = self.directory.ledger
        return journal.read(path.read_bytes().splitlines()) if path.exists() else []

    def events_of(self, kind: type[E], **fields: object) -> list[E]:
        """Read the events of one kind whose fields have these values."""
        found = [event for event in self.events() if isinstance(event, kind)]
        return [e for e in found if all(getattr(e, k) == v for k, v in fields.items())]

    def incidents(self) -> list[journal.Incident]:
        """Fold the ledger."""
        return journal.incidents(self.events())

    def losses(self, rank: int) -> dict[int, float]:
        """Return the loss of each step, the newest of each."""
        path = self.directory.path / "metrics" / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        return {each["step"]: each["metrics"]["loss"] for each in records}

    def results(self) -> dict[int, dict[str, Any]]:
        """Return what the ranks' last processes have written at their end."""
        found = {}
        for rank in range(self.ranks):
            newest = max(self.folder.glob(f"result-{rank}-*"), key=lambda p: p.stat().st_mtime_ns)
            found[rank] = json.loads(newest.read_text())
        return found

    def story(self) -> str:
        """Tell what has happened, for a failed test."""
        told = "\n".join(map(repr, self.events()))
        output = (self.folder / "output").read_text(errors="replace")[-3000:]
        return f"{told}\n{output}\n{time.ctime()}"


def assert_same(job: MindSporeJob, baseline: MindSporeJob, *, killed: int | None = None) -> None:
    """Every loss of every rank, each batch, and the parameters are the baseline's, to the bit.

    killed: a rank that may have done a step and not come to write its loss down.
    """
    assert_same_results(job, baseline)
    wanted = baseline.results()
    for rank in range(job.ranks):
        losses = job.losses(rank)
        seen = {step - 1: loss for _, step, loss, _ in wanted[rank]["seen"]}
        unwritten = seen.keys() - losses.keys()
        assert losses == {step: loss for step, loss in seen.items() if step not in unwritten}
        assert len(unwritten) <= (rank == killed), unwritten


def assert_same_results(job: MindSporeJob, baseline: MindSporeJob) -> None:
    """The same, as far as the ranks' last processes have seen it."""
    results, wanted = job.results(), baseline.results()
    for rank in range(job.ranks):
        seen = {step: (loss, data) for _, step, loss, data in wanted[rank]["seen"]}
        assert len(seen) == STEPS
        for epoch, step, loss, data in results[rank]["seen"]:
            assert (loss, data) == seen[step], f"rank {rank}, step {step}"
            assert epoch == (step - 1) * 3 // STEPS + 1
        assert results[rank]["digest"] == wanted[rank]["digest"]
