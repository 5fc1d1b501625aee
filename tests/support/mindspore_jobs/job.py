"""A job of MindSpore that runs in MindSpore's environment and that a test observes."""

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
from waiting import bound_s, wait_until

from rekindle.job.spec import job_directory
from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.journal import journal
from rekindle.testing.handle import JobHandle

# The default is the environment of `make mindspore`.
PYTHON = Path(
    os.environ.get("REKINDLE_TEST_MINDSPORE") or ROOT / ".venv-mindspore" / "bin" / "python"
)
SCRIPT = Path(__file__).with_name("train.py")
TFT_SCRIPT = Path(__file__).with_name("tft_train.py")
STEPS = 30
LIMIT_S = 150.0  # the start of all ranks takes 10 s on an idle machine and 30 s next to other tests

E = TypeVar("E", bound=journal.Event)
T = TypeVar("T")

needs_mindspore = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="MindSpore has no build for Python 3.13"
)


class MindSporeJob(JobHandle):
    """One job, as a context manager that ends all its processes."""

    def __init__(
        self,
        folder: Path,
        *script: str,
        ranks: int = 2,
        options: tuple[str, ...] = (),
        program: Path = SCRIPT,
        environment: Mapping[str, str] | None = None,
    ):
        super().__init__(job_directory("job", at=folder / "home"), limit_s=bound_s(LIMIT_S))
        self._own = environment or {}
        self.folder, self.ranks, self.mark = folder, ranks, uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        self._command = [str(PYTHON), "-m", "rekindle.cli.main", "run", "--framework", "mindspore"]
        self._command += ["--nproc-per-node", str(ranks), "--job-id", "job", "--allow-injection"]
        self._command += [*options, str(program), str(folder), *script]
        self.home = folder / "home"
        self._launcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> MindSporeJob:
        return self.start()

    def start(self) -> MindSporeJob:
        """Launch the job, or its next attempt."""
        own = {"REKINDLE_HOME": str(self.home), MARK: self.mark, "GLOG_v": "3"}
        # The tests use this source, not a version that is installed in the environment.
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
        self._launcher.wait(bound_s(LIMIT_S))
        wait_until(lambda: not marked_processes(self.mark), "all processes of the job gone")

    def has_ended(self) -> bool:
        """Return whether the launcher has ended."""
        return self._launcher is not None and self._launcher.poll() is not None

    def end(self) -> int:
        """Wait for the end of the launcher and return its status."""
        assert self._launcher is not None
        self.wait(self.has_ended, "the job's end")
        return self._launcher.returncode

    def wait(self, true: Callable[[], T], what: str) -> T:
        """Wait until `true()` returns a true value, and return it."""
        return self.wait_until(true, what, past_end=True)

    def wait_event(self, kind: type[E], **fields: object) -> E:
        """Wait for an event of this kind and return the newest."""
        super().wait_event(kind, **fields)
        return self.events_of(kind, **fields)[-1]

    def wait_step(self, step: int) -> None:
        """Wait until all ranks have finished this number of steps."""
        self.wait(lambda: min(map(len, map(self.losses, range(self.ranks)))) >= step, f"{step}")

    def hold(self, step: int, *, between: bool = False) -> None:
        """Pause all ranks after a number of steps, until `release`.

        `between`: whether they pause before they get the next batch; otherwise they pause with the
        batch, before its graph runs.
        """
        (self.folder / f"{'rest' if between else 'pause'}-{step}").touch()

    def release(self, step: int) -> None:
        """Let the ranks continue."""
        (self.folder / f"pause-{step}").unlink()

    def inject(self, rank: int, kind: InjectionKind, step: int) -> None:
        """Inject a fault into a rank in a step. Wait until all ranks train before."""
        self.wait_event(journal.Restored)
        super().inject(kind, rank=rank, step=step)

    def pids(self) -> list[int]:
        """Return the process ids of the ranks, once all train."""
        self.wait_event(journal.Restored)
        return [rank.pid for rank in self.status().ranks]

    def scheduler(self) -> psutil.Process:
        """Return MindSpore's scheduler. Its log file distinguishes it from the ranks."""
        for described in marked_processes(self.mark):
            process = psutil.Process(int(described.partition(":")[0]))
            if any("/scheduler_" in file.path for file in process.open_files()):
                return process
        raise AssertionError(f"no scheduler\n{self.story()}")

    # ---- results

    def losses(self, rank: int) -> dict[int, float]:
        """Return the loss of each step; for repeated steps, the newest."""
        return {step: each.metrics["loss"] for step, each in self.records().get(rank, {}).items()}

    def results(self) -> dict[int, dict[str, Any]]:
        """Return the results that the last process of each rank has written at its end."""
        found = {}
        for rank in range(self.ranks):
            newest = max(self.folder.glob(f"result-{rank}-*"), key=lambda p: p.stat().st_mtime_ns)
            found[rank] = json.loads(newest.read_text())
        return found

    def story(self) -> str:
        """Return the newest events, logs and output, for the message of a failed test."""
        output = (self.folder / "output").read_text(errors="replace")[-3000:]
        return f"{super().story()}\n---- output\n{output}\n{time.ctime()}"


def assert_same(
    job: MindSporeJob, baseline: MindSporeJob, *, unwritten: Mapping[int, int] | None = None
) -> None:
    """Check that losses, batches and parameters of all ranks equal the baseline's, bit by bit.

    `unwritten`: for a killed rank, the maximum number of finished steps whose loss is not written.
    """
    may_lack = unwritten or {}
    assert_same_results(job, baseline)
    wanted = baseline.results()
    for rank in range(job.ranks):
        losses = job.losses(rank)
        seen = {step - 1: loss for _, step, loss, _ in wanted[rank]["seen"]}
        lacking = seen.keys() - losses.keys()
        assert losses == {step: loss for step, loss in seen.items() if step not in lacking}
        assert len(lacking) <= may_lack.get(rank, 0), lacking


def assert_same_results(job: MindSporeJob, baseline: MindSporeJob) -> None:
    """Check that the results of the ranks' last processes equal the baseline's."""
    results, wanted = job.results(), baseline.results()
    for rank in range(job.ranks):
        seen = {step: (loss, data) for _, step, loss, data in wanted[rank]["seen"]}
        for epoch, step, loss, data in results[rank]["seen"]:
            assert (loss, data) == seen[step], f"rank {rank}, step {step}"
            assert epoch == (step - 1) * 3 // STEPS + 1
        assert results[rank]["digest"] == wanted[rank]["digest"]
