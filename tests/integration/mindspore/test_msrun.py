"""msrun with Rekindle: the agent watches msrun's workers."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from mindspore_jobs.baselines import Baseline
from mindspore_jobs.job import (
    PYTHON,
    SCRIPT,
    MindSporeJob,
    assert_same_results,
    needs_mindspore,
)
from training_jobs.processes import marked_processes

from rekindle.recovery.journal import journal

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
RANKS = 2


class MsrunJob(MindSporeJob):
    """A job of one msrun, with two workers of a script without Rekindle code."""

    def __init__(
        self, folder: Path, *script: str, restarts: int = 0, program: Path = SCRIPT
    ) -> None:
        super().__init__(folder, ranks=RANKS)
        command = [str(PYTHON), "-m", "rekindle.cli.main", "run", "--job-id", "job"]
        command += ["--max-restarts", str(restarts), "--no-python", str(PYTHON), "-m"]
        command += ["rekindle.training.msrun", "--local_worker_num", str(RANKS)]
        command += ["--log_dir", str(folder / "msrun"), str(program), str(folder), "--plain"]
        self._command = [*command, *script]

    def msrun(self) -> psutil.Process:
        """Return msrun's process, with all workers and the scheduler as its children."""

        def found() -> psutil.Process | None:
            for described in marked_processes(self.mark):
                pid, _, command = described.partition(": ")
                if "-m rekindle.training.msrun" in command and "rekindle.cli.main" not in command:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process = psutil.Process(int(pid))
                        if len(_scripts(process)) == 1 + RANKS:
                            return process
            return None

        return self.wait(found, "msrun and its workers")


def _scripts(msrun: psutil.Process) -> list[int]:
    """Return the children that run the script, without those that show its output."""
    return [each.pid for each in msrun.children() if str(SCRIPT) in each.cmdline()]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_are_watched(tmp_path: Path, baseline: Baseline) -> None:
    """The agent detects a killed worker, and all workers end with a killed msrun.

    All workers are then replaced, with another port and another scheduler. Their script starts from
    its first step, because it has no checkpoints. The last workers train as in an undisturbed job.
    On a busy machine MindSpore 2.10 itself has crashed during the connection of its processes.
    """
    with MsrunJob(tmp_path, "--die", "1:5:0", restarts=4) as job:
        job.wait_event(journal.FaultSeen)
        job.hold(8)
        msrun = job.msrun()
        children = _scripts(msrun)
        msrun.kill()
        job.wait(lambda: not any(map(_lives, children)), "their end")
        job.release(8)
        assert job.end() == 0, job.story()
        faults = [each.fault for each in job.events_of(journal.FaultSeen)]
        crashes = [each for each in faults if f"status {128 + signal.SIGSEGV}" in each.message]
        worker, _ = [each for each in faults if each not in crashes]
        output = (tmp_path / "output").read_text()
    assert "local worker 1 (process " in output
    assert "has ended by SIGKILL" in output
    assert f"status {128 + signal.SIGKILL}" in worker.message
    assert len(job.incidents()) == 2 + len(crashes)
    assert_same_results(job, baseline(RANKS))


def test_what_workers_have_started_ends_with_them(tmp_path: Path) -> None:
    """If a worker fails, msrun ends all workers and exits with that worker's status.

    The child processes of all workers end as well, including those of the failed worker.
    """
    program = "import os, subprocess, sys; env = os.environ; print(sorted(env), env['PATH'])\n"
    program += "if 'MS_NODE_ID' in env: subprocess.Popen(['sleep', '1000'])\n"
    program += "if env.get('MS_NODE_ID') == '1': sys.exit(7)\nimport time; time.sleep(1000)\n"
    script = tmp_path / "starts_another"
    script.write_text(program)
    with MsrunJob(tmp_path, program=script) as job:
        assert job.end() == 1, job.story()
        (fault,) = [each.fault for each in job.events_of(journal.FaultSeen)]
        assert "status 7" in fault.message
        assert not [each for each in marked_processes(job.mark) if "sleep" in each]
    output = (tmp_path / "msrun" / "worker_0.log").read_text()
    assert "'RANK_ID'" in output
    for name in ("'RANK'", "MS_ENABLE_TFT", "MS_ENABLE_RECOVERY", "REKINDLE_MSRUN_PATH"):
        assert name not in output
    assert os.environ["PATH"] in output
