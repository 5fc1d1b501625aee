"""Run a job in the foreground of a terminal, from its start to its exit status."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from types import FrameType

from rekindle.console import say
from rekindle.engines.follower import JobFollower
from rekindle.engines.local import LocalEngine
from rekindle.job.journal_reader import events_in
from rekindle.job.lifeline import PASSED_ON, catches
from rekindle.job.spec import Endpoint, JobDirectory
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import RESCHEDULED, STOPPED, SUCCEEDED
from rekindle.reporting.event_text import level, words

END_S = 30.0  # time that coordinator and agents may take after the job's end


def run(
    engine: LocalEngine,
    directory: JobDirectory,
    stop: Stop,
    *,
    attempt: int,
    launched: Callable[[Endpoint], None] = lambda endpoint: None,
) -> int:
    """Run the job to its end and return the exit status: torchrun's, or 128 + signal.

    A job that another command stopped has status 1. A signal before the launch prevents it.

    launched: receives the endpoint of each attempt's coordinator.
    """
    events: list[journal.AnyEvent] = []
    known = len(events_in(directory.journal_file)) if attempt else 0

    def see(event: journal.AnyEvent) -> None:
        if isinstance(event, journal.Progress):  # it has no number, and is not in a journal
            return
        events.append(event)
        if level(event) >= logging.INFO:
            say(words(event), level(event))

    follower = JobFollower(
        engine,
        holder=f"rekindle run (process {os.getpid()})",
        see=see,
        say=say,
        is_stopped=lambda: bool(stop.signals),
    )
    stop.engine = engine
    while True:
        if stop.signals:
            return 128 + stop.signals[0]
        endpoint = engine.launch(attempt=attempt)
        stop.launched()
        launched(endpoint)
        follower.follow(endpoint, known, lambda first: stop.launched())
        end = events[-1] if events and isinstance(events[-1], journal.Ended) else None
        joined = {event.pid for event in events if isinstance(event, journal.NodeJoined)}
        _reap(engine, joined if end is not None else set())
        if stop.signals:
            return 128 + stop.signals[0]
        if end is None or end.outcome != RESCHEDULED:
            break
        attempt += 1
        say(f"attempt {attempt} begins", logging.INFO)
    if end is not None and end.outcome == SUCCEEDED:
        return 0
    _explain(events, directory)
    return 1


class Stop:
    """Passes signals on to the coordinator. The first signal stops the job, the second kills it.

    Signals of PASSED_ON go to the agents, which pass them on to the ranks.

    engine: starts the coordinator.

    Create it before the job has files: Python can lose a KeyboardInterrupt, for example in an
    import, and the job would then start in spite of Ctrl-C.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.engine: LocalEngine | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        for number in PASSED_ON:
            signal.signal(number, self._tell_agents)

    def launched(self) -> None:
        """Pass on a signal that came before the coordinator, or the next one, started."""
        if self.signals:
            self._pass_on()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if len(self.signals) == 1:
            name = signal.Signals(number).name
            say(f"{name}: the job stops; a second signal ends it immediately")
        self._pass_on()

    def _pass_on(self) -> None:
        coordinator = self.engine.coordinator if self.engine is not None else None
        if coordinator is not None and coordinator.poll() is None:
            coordinator.send_signal(stop_signal(self.signals))

    def _tell_agents(self, number: int, frame: FrameType | None) -> None:
        pass_on(number, self.engine.agents if self.engine is not None else [])


def stop_signal(signals: Sequence[int]) -> signal.Signals:
    """Return the signal that stops a process of the launcher; a second one ends it at once.

    signals: the ones that the launcher got. A scheduler may send SIGTERM to all processes, so only
    SIGINT counts as a repetition.
    """
    return signal.SIGTERM if len(signals) == 1 else signal.SIGINT


def pass_on(number: int, agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Pass a signal on to the agents. It would end an agent that still starts."""
    for agent in agents:
        if agent.poll() is None and catches(agent.pid, number):
            agent.send_signal(number)


def _reap(engine: LocalEngine, dismissed: set[int]) -> None:
    """Wait for the coordinator and the agents. dismissed: agents that the coordinator dismisses."""
    # The coordinator ends after its agents. A failed one has no status yet when its connections
    # close.
    failed = engine.coordinator is not None and _status(engine.coordinator) not in (0, 1)
    for agent in engine.agents:
        if failed or agent.pid not in dismissed:
            agent.terminate()
    for agent in engine.agents:
        _status(agent)


def _status(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _explain(events: list[journal.AnyEvent], directory: JobDirectory) -> None:
    """Show how the job ended, and the first failing rank with its traceback, as torchrun does."""
    found = [i for i in journal.incidents(events) if i.faults and not i.closed]
    stopped = any(isinstance(e, journal.Ended) and e.outcome == STOPPED for e in events[-1:])
    lines = [f"the job {'was stopped' if stopped else 'failed'}"]
    if found:
        cause = found[-1].cause
        lines += [f"  first fault: {cause.blamed()}: {cause.message}"]
        lines += [f"  steps finished before it: {cause.finished}"] if cause.finished else []
        lines += [cause.traceback.rstrip()] if cause.traceback else []
    lines += [f"  logs of all ranks: {directory.spec().log_directory}"]
    say("\n".join(lines), logging.ERROR)
