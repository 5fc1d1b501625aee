"""A job is stopped, at any moment: it ends cleanly, and the same job id resumes it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault, reached, write_faults
from training_jobs.job import LIMIT_S, STEPS, wait_until
from training_jobs.processes import marked_processes, rekindle_run
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.checkpoints.directory import DirectoryStore

OPTIONS = ("--checkpoint-every", "4", "--snapshot-every", "4")


class Command:
    """`rekindle run` of the training script, as a person starts it and stops it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.job = folder / "home" / "jobs" / "job"
        self.record = Record(folder, STEPS, self.job / "metrics")
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *faults: Fault) -> subprocess.Popen[str]:
        """Start it, or start it again."""
        write_faults(self.folder, list(faults))
        self.processes.append(rekindle_run(self.folder, mark=self.mark, options=OPTIONS))
        return self.processes[-1]

    def ledger(self) -> list[dict[str, object]]:
        """Read the ledger as it is."""
        path = self.job / "ledger.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_event(self, kind: str) -> None:
        """Wait for an event of this kind."""
        wait_until(lambda: kind in [event["type"] for event in self.ledger()], f"{kind} event")

    def leftovers(self) -> list[str]:
        """List the processes that still live."""
        return marked_processes(self.mark)

    def close(self) -> None:
        """End all that a failed test has left."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """The command, not started yet."""
    command = Command(tmp_path)
    yield command
    command.close()


def assert_resumes(command: Command, baseline: Record) -> None:
    """The same command again ends the job with the baseline's training."""
    process = command.start()
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert_same_training(command.record, baseline)
    assert_samples_once(command.record)
    assert command.leftovers() == []


@pytest.mark.parametrize(
    ("moment", "number"),
    soak_but(
        [
            ("job-started", signal.SIGINT),
            ("ranks-started", signal.SIGTERM),
            ("formed", signal.SIGINT),
            ("fault", signal.SIGTERM),
            ("decided", signal.SIGINT),
        ],
        ("job-started", signal.SIGINT),
        ("fault", signal.SIGTERM),
    ),
)
def test_stopped_at_a_moment(
    moment: str, number: signal.Signals, command: Command, baseline: Record
) -> None:
    """Stopped while it starts, trains or recovers, a job leaves nothing, and resumes."""
    process = command.start(Fault(1, "forward", 14))
    command.wait_event(moment)
    process.send_signal(number)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number, said
    assert command.leftovers() == []
    assert command.ledger()[-1]["outcome"] == "stopped"
    assert_resumes(command, baseline)


@pytest.mark.parametrize("seed", soak_but(range(2), 0))
def test_stopped_in_some_step(seed: int, command: Command, baseline: Record) -> None:
    """Stopped in the middle of training, a job goes on from its newest checkpoint."""
    step = random.Random(seed).randrange(6, STEPS - 6)
    process = command.start(Fault(0, "backward", step, do="pause"))
    wait_until(reached(command.folder, 0).exists, f"step {step}")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert command.leftovers() == []
    found = DirectoryStore(command.job / "checkpoints").newest().checkpoint
    assert found is not None
    assert_resumes(command, baseline)
    formed = [event for event in command.ledger() if event["type"] == "formed"]
    assert formed[-1]["step"] == found.manifest.step


def test_second_signal_ends_at_once(command: Command) -> None:
    """A second Ctrl-C does not wait for ranks that ignore the first."""
    process = command.start(Fault(2, "forward", 9, do="stop"))
    wait_until(reached(command.folder, 0).exists, "the stopped rank")
    process.send_signal(signal.SIGINT)
    command.wait_event("stopping")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT, said
    assert command.leftovers() == []


def test_killed_launcher_leaves_nothing(command: Command, baseline: Record) -> None:
    """When `rekindle run` itself is killed its job ends with it, and can be resumed."""
    process = command.start()
    command.wait_event("first-step")
    process.kill()
    wait_until(lambda: not command.leftovers(), "everything gone")
    assert_resumes(command, baseline)
