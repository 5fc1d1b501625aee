"""A job that is stopped at any moment ends cleanly, and the same job id resumes it.

One job is stopped many times, each time at another moment, and then trains to its end.
"""

from __future__ import annotations

import json
import signal
import subprocess
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from training_jobs.checks import assert_same_training, assert_samples_once
from training_jobs.injection import Fault, reached, write_faults
from training_jobs.job import STEPS
from training_jobs.processes import marked_processes, rekindle_run
from training_jobs.record import Record
from waiting import bound_s, wait_until

from rekindle.checkpoints.directory import DirectoryStore

OPTIONS = ("--checkpoint-every", "4", "--snapshot-every", "4")


class Command:
    """`rekindle run` of the training script, as a user starts and stops it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.job = folder / "home" / "jobs" / "job"
        self.record = Record(folder, STEPS, self.job / "metrics")
        self.before = 0  # events in the journal before the newest start

    def start(self, *faults: Fault) -> subprocess.Popen[str]:
        """Start or restart the command."""
        write_faults(self.folder, list(faults))
        self.before = len(self.journal())
        return rekindle_run(self.folder, mark=self.mark, options=OPTIONS)

    def journal(self) -> list[dict[str, object]]:
        """Read the journal's complete lines."""
        path = self.job / "journal.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def events(self, kind: str) -> list[dict[str, object]]:
        """Return the events of this kind since the newest start."""
        return [event for event in self.journal()[self.before :] if event["type"] == kind]

    def wait_event(self, kind: str) -> None:
        """Wait for an event of this kind."""
        wait_until(lambda: self.events(kind), f"{kind} event")

    def wait_fault(self) -> None:
        """Wait for the first fault."""
        wait_until(reached(self.folder, 0).exists, "the fault")

    def newest(self) -> int:
        """Return the step of the newest checkpoint, or -1."""
        found = DirectoryStore(self.job / "checkpoints").newest().checkpoint
        return -1 if found is None else found.manifest.step


@dataclass(frozen=True)
class Stop:
    """A way to stop the job; `stop` waits for the moment and ends the process."""

    name: str
    stop: Callable[[Command, subprocess.Popen[str]], None]
    status: int
    faults: tuple[Fault, ...] = ()
    outcome: str | None = "stopped"

    def __str__(self) -> str:
        return self.name


@dataclass
class Stopped:
    """The state of a stopped job. formed: the steps from which the next start continued."""

    status: int
    output: str
    left: list[str]
    newest: int
    last: dict[str, object]
    formed: list[int] = field(default_factory=list)


def at_event(kind: str, number: signal.Signals) -> Stop:
    """Return a stop by a signal while the job starts, trains or recovers."""

    def stop(command: Command, process: subprocess.Popen[str]) -> None:
        command.wait_event(kind)
        process.send_signal(number)

    fault = Fault(1, "forward", 6, life=0)
    return Stop(f"{number.name} at {kind}", stop, 128 + number, (fault,))


def in_a_step(command: Command, process: subprocess.Popen[str]) -> None:
    command.wait_fault()
    process.send_signal(signal.SIGTERM)


def twice(command: Command, process: subprocess.Popen[str]) -> None:
    """Send Ctrl-C twice; the second one does not wait for ranks that ignore the first."""
    command.wait_fault()
    process.send_signal(signal.SIGINT)
    command.wait_event("stopping")
    process.send_signal(signal.SIGINT)


def killed(command: Command, process: subprocess.Popen[str]) -> None:
    """Kill `rekindle run`; wait until its job has ended."""
    command.wait_fault()
    process.kill()
    wait_until(lambda: not marked_processes(command.mark), "the end of all processes")


STOPS = (
    at_event("job-started", signal.SIGINT),
    at_event("fault", signal.SIGTERM),
    Stop("in a step", in_a_step, 128 + 15, (Fault(0, "backward", 11, do="pause", life=0),)),
    Stop("twice", twice, 128 + 2, (Fault(2, "forward", 15, do="stop", life=0),), None),
    Stop("killed", killed, -9, (Fault(3, "forward", 19, do="pause", life=0),), None),
)
MORE = (
    at_event("ranks-started", signal.SIGTERM),
    at_event("formed", signal.SIGINT),
    at_event("decided", signal.SIGINT),
)


class Story:
    """A job that was stopped in several ways, and has trained to its end."""

    def __init__(self, folder: Path, stops: Sequence[Stop]) -> None:
        self.command = Command(folder)
        self.stopped: dict[Stop, Stopped] = {}
        self.process: subprocess.Popen[str] | None = None
        try:
            for stop in stops:
                self._run(stop, stop.faults)
            self._run(None, ())
        except AssertionError as error:
            self.error = str(error)
        finally:
            if self.process is not None and self.process.poll() is None:
                self.process.kill()
                self.process.communicate()

    error = ""

    def _run(self, stop: Stop | None, faults: tuple[Fault, ...]) -> None:
        self.process = self.command.start(*faults)
        if stop is not None:
            stop.stop(self.command, self.process)
        output, _ = self.process.communicate(timeout=bound_s())
        for earlier in [*self.stopped.values()][-1:]:
            earlier.formed = [event["step"] for event in self.command.events("formed")]
        self.end = Stopped(
            self.process.returncode,
            output,
            marked_processes(self.command.mark),
            self.command.newest(),
            self.command.journal()[-1],
        )
        if stop is not None:
            self.stopped[stop] = self.end


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Stop]], Story]:
    """Return a function that runs the job through some stops, once."""
    known: dict[Sequence[Stop], Story] = {}

    def run(stops: Sequence[Stop]) -> Story:
        if stops not in known:
            known[stops] = Story(tmp_path_factory.mktemp("stopped"), stops)
        return known[stops]

    return run


CASES = [
    *(pytest.param(STOPS, stop, id=str(stop)) for stop in STOPS),
    *(pytest.param(MORE, stop, id=str(stop), marks=pytest.mark.soak) for stop in MORE),
]


@pytest.mark.parametrize(("stops", "stop"), CASES)
def test_stopped(
    stops: Sequence[Stop], stop: Stop, stories: Callable[[Sequence[Stop]], Story]
) -> None:
    """A stopped job leaves no process, and continues from its newest checkpoint."""
    story = stories(stops)
    assert stop in story.stopped, story.error
    found = story.stopped[stop]
    assert found.status == stop.status, found.output
    assert found.left == []
    if stop.outcome is not None:
        assert found.last["outcome"] == stop.outcome
    if stop.name == "in a step":
        assert found.newest > 0
    if found.formed:  # the next start was not stopped before its first generation
        assert found.formed[0] == max(found.newest, 0), story.command.journal()


@pytest.mark.parametrize("stops", [STOPS, pytest.param(MORE, marks=pytest.mark.soak)])
def test_end(
    stops: Sequence[Stop], stories: Callable[[Sequence[Stop]], Story], baseline: Record
) -> None:
    """The job's training after all stops equals that of an undisturbed job."""
    story = stories(stops)
    assert not story.error
    assert story.end.status == 0, story.end.output
    assert_same_training(story.command.record, baseline)
    assert_samples_once(story.command.record)
    assert story.end.left == []
