"""Run a trial: start its job, cause its faults, and check its end."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
from jobs import Place
from training_jobs.record import Record
from waiting import join, wait_until

from campaign.expectations import Effect, End, Expectation, expected
from campaign.faults import Act, Fault, Victim
from campaign.kinds import STEPS
from campaign.launches import Launch, launched
from campaign.moments import ATTEMPT_S, Attempt
from campaign.results import Shared, check_training, left_behind
from campaign.trials import Trial
from campaign.victims import Processes
from rekindle.recovery.journal import journal

STEERS = (Victim.LAUNCHER, Victim.FLOW)
STOPPED_S = 60.0
_LOOK_S = 0.05
_SIGNALS = {
    Act.KILL: signal.SIGKILL,
    Act.TERM: signal.SIGTERM,
    Act.STOP: signal.SIGSTOP,
    Act.PAUSE: signal.SIGSTOP,
}


@dataclasses.dataclass
class Result:
    """The result of a trial.

    `happened`: a line for each fault.
    `ends`: of the attempts.
    `problems`: the differences from the expectation.
    `story`: output and journal, if there is a problem.
    """

    trial: Trial
    expectation: Expectation
    happened: list[str] = dataclasses.field(default_factory=list)
    ends: list[End] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    story: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"  happened: {line}" for line in self.happened]
        lines.append(f"  attempts: {', '.join(self.ends) or 'none'}, {self.seconds:.0f} s")
        lines += [f"  PROBLEM: {problem}" for problem in self.problems]
        lines.append(f"  result: {'not as expected' if self.problems else 'as expected'}")
        return "\n".join(lines)


def run_trial(trial: Trial, folder: Path, shared: Shared) -> Result:
    """Run a trial in an empty folder; never raise an error of the job."""
    result = Result(trial, expected(trial))
    begun = time.monotonic()
    before = set(Path("/dev/shm").iterdir())
    with (
        _place(trial, folder) as place,
        launched(trial.kind, place, uuid.uuid4().hex, shared.server) as launch,
    ):
        run = TrialRun(trial, launch, result)
        try:
            run.run()
            check_training(trial.kind, run.attempt.record, run.history(), shared)
        except Exception as error:
            result.problems.append(f"{type(error).__name__}: {str(error)[:2000]}")
        finally:
            run.close()
        result.problems += left_behind(place, before)
        if result.problems:
            result.story = _story(launch)
    result.seconds = time.monotonic() - begun
    return result


def _story(launch: Launch) -> str:
    try:
        return launch.story()
    except Exception as error:
        return f"no story: {error}"


@contextlib.contextmanager
def _place(trial: Trial, folder: Path) -> Iterator[Place]:
    if trial.kind.flow:
        from campaign.flow_launch import PlaceOfFlow  # Prefect takes seconds to import

        with PlaceOfFlow(folder) as place:
            yield place
    else:
        with Place(folder) as place:
            yield place


class TrialRun:
    """A trial that runs."""

    def __init__(self, trial: Trial, launch: Launch, result: Result) -> None:
        self.trial, self.launch, self.result = trial, launch, result
        self._paused: list[tuple[psutil.Process, threading.Timer | None]] = []
        self._finished = 0  # steps before the newest fault

    def history(self) -> list[journal.AnyEvent]:
        """Return all events of the job."""
        self.attempt.begun = 0
        return self.attempt.events()

    def run(self) -> None:
        """Run attempts until one succeeds."""
        pending = list(zip(self.trial.faults, self.result.expectation.effects, strict=True))
        while True:
            self._start()
            met = self._meet(pending)
            end = self._end()
            self.result.ends.append(end)
            self._check_end(end, met)
            self._check_steps()
            if end is End.SUCCEEDED:
                break
        for fault, _ in pending:
            self.result.happened.append(f"{fault}: not met, the job succeeded before")

    def _start(self) -> None:
        self.launch.start()
        directory = self.launch.directory
        if not self.result.ends:
            kind = self.trial.kind
            metrics = directory.path / "metrics"
            record = Record(self.launch.place.folder, STEPS, metrics, ranks=kind.world_size)
            self.attempt = Attempt(self.launch, record, Processes(self.launch, record))
        self.attempt.begun = 0
        self.attempt.begun = len(self.attempt.events())

    def _meet(self, pending: list[tuple[Fault, Effect]]) -> list[Effect]:
        """Cause faults until the attempt ends; return their effects."""
        met: list[Effect] = []
        while pending and self.attempt.reaches(pending[0][0]):
            fault, effect = pending.pop(0)
            self._finished = self.attempt.finished()
            if self._strike(fault):
                met.append(effect)
                if effect.certain:
                    break
        return met

    def _strike(self, fault: Fault) -> bool:
        process = self.attempt.processes.find(fault.victim, fault.number)
        if process is None:
            self.result.happened.append(f"{fault}: not met, there is no such process")
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(_SIGNALS[fault.act])
        self.result.happened.append(
            f"{fault}: process {process.pid}, {self.attempt.finished()} steps finished"
        )
        timer = None
        if fault.act is Act.PAUSE:
            timer = threading.Timer(fault.paused_s, _resume, [process])
            timer.start()
        if timer or (fault.act is Act.STOP and fault.victim in STEERS):
            self._paused.append((process, timer))
        return True

    def _end(self) -> End:
        """Wait for the end of the attempt.

        A launcher that is stopped without a set time continues when the job has ended, because
        nothing else ends it. It also continues after STOPPED_S, because the job may wait for it.
        """
        with contextlib.suppress(AssertionError):  # the job may wait for its launcher
            limit_s = STOPPED_S if any(t is None for _, t in self._paused) else ATTEMPT_S
            wait_until(self.attempt.is_over, "the end of the job", limit_s, pause_s=_LOOK_S)
        for process, timer in self._paused:
            if timer is None:
                _resume(process)
        wait_until(self.launch.has_ended, "the launcher's end", ATTEMPT_S, pause_s=_LOOK_S)
        self.launch.place.wait_for_silence()
        return self.launch.end()

    def _check_end(self, end: End, met: list[Effect]) -> None:
        allowed = {each for effect in met for each in effect.ends}
        if not any(effect.certain for effect in met):
            allowed.add(End.SUCCEEDED)
        assert end in allowed, f"the attempt {end.value}; allowed: {sorted(allowed)}"

    def _check_steps(self) -> None:
        """Check the steps that the attempt repeated, if the expectation states their number."""
        most = self.result.expectation.steps_lost
        if most is None:
            return
        events = self.attempt.events()
        lost = [incident.steps_lost or 0 for incident in journal.incidents(events)]
        formed = [event.step for event in events if isinstance(event, journal.Formed)]
        if len(self.result.ends) > 1:  # it continues an earlier attempt
            lost.append(self._finished - formed[0])
        assert max(lost, default=0) <= most, f"{lost} steps were lost, not at most {most}"

    def close(self) -> None:
        """Let all paused processes continue."""
        for process, timer in self._paused:
            if timer is not None:
                join(timer)
            _resume(process)


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()
