"""A job in the foreground: what `rekindle run` does between its first line and its exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from types import FrameType

from rekindle.engines.follower import JobFollower
from rekindle.engines.local import LocalEngine
from rekindle.job.journal_reader import events_in
from rekindle.job.spec import Endpoint, JobDirectory
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import RESCHEDULED

END_S = 30.0  # how long coordinator and agents may take after the job's end


def run(
    engine: LocalEngine,
    directory: JobDirectory,
    *,
    attempt: int,
    launched: Callable[[Endpoint], None] = lambda endpoint: None,
) -> int:
    """Run the job to its end and return the exit status: torchrun's, or 128 + signal.

    launched: is told where the coordinator listens.
    """
    stop = _Stop(engine)
    seen: list[journal.AnyEvent] = []
    known = len(events_in(directory.ledger)) if attempt else 0

    def see(event: journal.AnyEvent) -> None:
        if not isinstance(event, journal.Progress):  # it has no number, and is in no journal
            seen.append(event)
            _tell(event)

    follower = JobFollower(
        engine,
        holder=f"rekindle run (process {os.getpid()})",
        see=see,
        say=lambda text: say(f"rekindle: {text}"),
        is_over=lambda: bool(stop.signals),
    )
    while True:
        endpoint = engine.launch(attempt=attempt)
        stop.launched()
        launched(endpoint)
        follower.follow(endpoint, known)
        _reap(engine, {event.pid for event in seen if isinstance(event, journal.NodeJoined)})
        if stop.signals:
            return 128 + stop.signals[0]
        end = seen[-1] if seen and isinstance(seen[-1], journal.Ended) else None
        if end is None or end.outcome != RESCHEDULED:
            break
        attempt += 1
        say(f"rekindle: attempt {attempt} begins")
    if end is not None and end.outcome == "succeeded":
        return 0
    _explain(seen, directory)
    return 1


class _Stop:
    """Passes signals on to the coordinator: the first asks the job to end, the second ends it."""

    def __init__(self, engine: LocalEngine) -> None:
        self.signals: list[int] = []
        self._engine = engine
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def launched(self) -> None:
        """Pass on what came before there was a coordinator."""
        if self.signals:
            self._pass_on()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if len(self.signals) == 1:
            say(f"rekindle: {signal.Signals(number).name}: stopping; a second one ends at once")
        self._pass_on()

    def _pass_on(self) -> None:
        coordinator = self._engine.coordinator
        if coordinator is not None and coordinator.poll() is None:
            coordinator.terminate()


def _reap(engine: LocalEngine, joined: set[int]) -> None:
    """Wait for coordinator and agents; `joined`: agents that the coordinator says goodbye to."""
    coordinator, agents = engine.coordinator, engine.agents
    # The coordinator ends after its agents; one that died is no zombie yet when its lines close.
    died = coordinator is not None and _status(coordinator) not in (0, 1)
    for agent in agents:
        if died or agent.pid not in joined:
            agent.terminate()  # nobody is left to tell it
    for agent in agents:
        _status(agent)


def _status(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def say(text: str) -> None:
    """Tell the person at the terminal; one that has gone away does not end the job.

    Not by print: it could be interrupted by a signal's handler, and refuses to be entered twice.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def _tell(event: journal.AnyEvent) -> None:
    """Say on stderr what a person at the terminal wants to know."""
    text = _saying(event)
    if text:
        say(f"rekindle: {text}")


def _saying(event: journal.AnyEvent) -> str:
    match event:
        case journal.FaultSeen(incident=number, fault=fault):
            return f"incident {number}: {fault.message}"
        case journal.Decided(incident=number, strategy=strategy, reason=reason, lighter=False):
            return f"incident {number}: {strategy.value}: {reason}"
        case journal.Isolated(incident=number, host=host):
            return f"incident {number}: nothing is placed on {host} any more"
        case journal.Answered(incident=number, strategy=strategy, granted=granted, by=by):
            said = "approved" if granted else "not approved"
            return f"incident {number}: {strategy.value} was {said} by {by}"
        case journal.Formed(incident=number, sources=sources) if number:
            whence = ", ".join(f"{count} x {source}" for source, count in sources.items())
            return (
                f"incident {number}: generation {event.generation} goes on after step "
                f"{event.step} ({whence})"
            )
        case journal.Formed() if event.step:
            world = f"generation {event.generation} of {event.world_size} ranks"
            return f"{world} goes on after step {event.step}"
        case journal.NodeChecked():
            return event.in_words()
        case journal.NodeLeft(reason=reason) if reason:
            return f"node {event.node} has left: {reason}"
        case journal.LastWords(path=path):
            return event.in_words() + ("; the same --job-id goes on from it" if path else "")
        case _:
            return _saying_of_checkpoints(event)


def _saying_of_checkpoints(event: journal.AnyEvent) -> str:
    match event:
        case journal.CheckpointFailed(fault=fault):
            return f"{fault.message}; training goes on"
        case journal.CheckpointSkipped(path=path, reason=reason):
            return f"checkpoint {path} is passed over: {reason}"
        case journal.CheckpointLeftOut() | journal.CheckpointInterval():
            return event.in_words()
        case journal.CheckpointsPruned(error=error):
            return error
    return ""


def _explain(seen: list[journal.AnyEvent], directory: JobDirectory) -> None:
    """Show the first failing rank as torchrun does, with its traceback."""
    found = [i for i in journal.incidents(seen) if i.faults and not i.closed]
    lines = ["rekindle: the job failed"]
    if found:
        cause = found[-1].cause
        lines += [f"  first fault: {cause.blamed()}: {cause.message}"]
        lines += [f"  steps finished before it: {cause.finished}"] if cause.finished else []
        lines += [cause.traceback.rstrip()] if cause.traceback else []
    lines += [f"  logs of all ranks: {directory.spec().log_directory}"]
    say("\n".join(lines))
