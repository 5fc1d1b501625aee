"""When a rank takes snapshots: after steps, and when it must end."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from rekindle import names
from rekindle.checkpoints.format import METADATA_METRICS, METADATA_POSITION
from rekindle.errors import CheckpointError
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.held_state import RankPlace
from rekindle.rank.profiler import Profiler
from rekindle.rank.snapshot_writer import SnapshotWriter

LIMIT_S = 5.0  # for an update that is under way to end; the agent kills after 10 s
_TICK_S = 0.001
_SIG_DFL = 0


class Updates(Protocol):
    """What knows which updates have begun, as something that changes by it; None: it does not."""

    @property
    def begun(self) -> object: ...


class Moment(NamedTuple):
    """When a state is kept. step: steps finished; inside: the next one is under way.

    holds: whether the state is still that one. Asked when it has been copied: a copy that it does
    not hold for is of no step.
    """

    step: int
    inside: bool
    holds: Callable[[], bool]


class FinalSnapshot:
    """The state that a rank gives its agent when SIGTERM ends it, once `listen()` was called.

    keep: keeps the state of this moment, and says whether it could; called by a thread of ours.
    updates: tells whether that of the step under way has begun; None: nobody can tell.
    """

    def __init__(self, updates: Updates | None, keep: Callable[[Moment], bool]) -> None:
        self._updates = updates
        self._keep = keep
        self.apart = threading.Lock()  # held by whoever else gives the agent a state
        self._ending = threading.Event()
        self._in_step = False
        self._finished = 0
        self._begun: object = None  # before the step under way
        self._pid = os.getpid()
        self._heard = self._told = -1

    def listen(self) -> None:
        """Keep the state at the signal. A script's own handler of it stays."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._heard, self._told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._heard, True)
        # Python's own handler would run in the main thread alone; the pipe is written to at once.
        signal.signal(signal.SIGTERM, _leave_it_to_the_thread)
        signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)  # of a loader's workers, it is not theirs
        threading.Thread(target=self._run, name="rekindle-final-snapshot", daemon=True).start()

    def begin_step(self, finished: int) -> None:
        """The step's graph is about to run; no other does once this process has to end."""
        self._begun = self._updates.begun if self._updates else None
        # In this order: whoever has set the one looks at the other afterwards.
        self._finished, self._in_step = finished, True
        if self._ending.is_set():
            self._in_step = False
            threading.Event().wait()  # the process ends beside it

    def end_graph(self) -> None:
        """It has run, and others may change the state: it is of no step until they have."""
        self._begun = None

    def end_step(self, finished: int) -> None:
        """All have."""
        self._finished, self._in_step = finished, False

    def close(self) -> None:
        """From now on the signal ends the process as ever."""
        if self._told >= 0:
            self._forget()
            os.close(self._told)
            self._told = -1

    def _forget(self) -> None:
        if self._told >= 0:
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _run(self) -> None:
        while heard := os.read(self._heard, 1):
            # A script may have taken the signal over meanwhile.
            ours = signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread
            if heard[0] == signal.SIGTERM and ours:
                self._ending.set()
                try:
                    self._say()
                finally:
                    ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, _SIG_DFL)
                    os.kill(self._pid, signal.SIGTERM)
        os.close(self._heard)

    def _say(self) -> None:
        """Give the agent the state, if it can be told of which step it is."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            step, inside = self._finished, self._in_step
            moment = Moment(step, inside, functools.partial(self._holds, step, inside))
            if moment.holds() and self._try(moment):
                return
            time.sleep(_TICK_S)

    def _try(self, moment: Moment) -> bool:
        """Keep the state of this moment; False: it has passed, and the next one may do."""
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(_claim_of(moment.step))
            except OSError:
                return True  # all ranks have the same state: another one of the node keeps it
            with self.apart:
                kept = self._keep(moment)
        if not kept and moment.holds():
            why = "no room for it, or it was changed"
            told = f"rekindle: the state after step {moment.step} could not be kept: {why}"
            print(told, file=sys.stderr, flush=True)
            return True
        return kept

    def _holds(self, step: int, inside: bool) -> bool:
        if (self._finished, self._in_step) != (step, inside):
            return False
        if not inside:
            return True
        return self._begun is not None and bool(
            self._updates and self._updates.begun == self._begun
        )


def _leave_it_to_the_thread(*_: object) -> None:
    """What the main thread does about the signal: nothing."""


def _claim_of(step: int) -> str:
    """Return the name of a socket that one process of a node can have at a time."""
    said = (os.environ.get(name, "") for name in (names.ENV_JOB_ID, names.ENV_NODE_RANK))
    return "\0rekindle-final-snapshot-" + "-".join((*said, str(os.getppid()), str(step)))


REST_S = 600.0  # once the agent had no memory: others may have given some back by then


class SnapshotSchedule:
    """Takes the snapshots that are due after a step; without an agent, none."""

    def __init__(
        self,
        channel: Channel | None,
        place: RankPlace,
        profiler: Profiler,
        writer: Callable[[Channel, RankPlace], SnapshotWriter],
    ) -> None:
        self._profiler = profiler
        self._channel = channel
        self._writer = writer(channel, place) if channel else None
        # Replicas hold the same state: one of each node keeps it, one of all has it written. Which
        # others of a node hold the same shard is not known here.
        snapshot_every = rank_environment.number(names.ENV_SNAPSHOT_EVERY)
        keeps = rank_environment.number("LOCAL_RANK") == 0 or place.shard is not None
        self._snapshot_every = snapshot_every if keeps else 0
        self._keeps = snapshot_every > 0
        self._missed_checkpoint = False
        self._rests_until = 0.0
        self._checkpointed = 0  # the step of the newest

    def keep(
        self,
        named: Mapping[str, Any],
        *,
        place: RankPlace,
        step: int,
        last: bool,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Take a snapshot of the state after `step` finished steps, if one is due.

        last: training ends with it. position: where the next step's data begin. metrics: what the
        last of them has logged.
        """
        if self._writer is None or self._channel is None:
            return
        every = self._channel.settings.checkpoint_every
        if step < self._checkpointed:
            self._checkpointed = 0  # training has gone back: what comes is another state
        checkpoint = place.writes and (
            self._missed_checkpoint or _is_due(step, every) or (last and every > 0)
        )
        if last and step == self._checkpointed:
            return  # the script has left its loop early, after a step whose checkpoint was due
        if not checkpoint and not _is_due(step, self._snapshot_every):
            return
        if not last and time.monotonic() < self._rests_until:
            return
        began = time.time_ns()
        try:
            taken = self._writer.take(
                named,
                place=place,
                step=step,
                notes={METADATA_POSITION: position, METADATA_METRICS: metrics},
                checkpoint=checkpoint,
                wait=last and checkpoint,
            )
        except CheckpointError:
            # The agent has no memory for it, and has said so: training goes on without.
            self.close()
            self._rests_until = time.monotonic() + REST_S
            self._missed_checkpoint = False
            return
        if taken:
            self._profiler.saved(began)
        self._missed_checkpoint = checkpoint and not taken
        if checkpoint and taken:
            self._checkpointed = step

    def keep_last(
        self,
        named: Mapping[str, Any],
        *,
        place: RankPlace,
        step: int,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
        holds: Callable[[], bool],
    ) -> bool:
        """Take a snapshot of what may be lost with this process, if any are taken at all.

        place: in the generation that did the last of the steps. holds: whether the state is still
        that of this step. By a rank that keeps none else, too. False: there is no snapshot.
        """
        if self._writer is None or not self._keeps:
            return True  # nobody wants one
        notes = {METADATA_POSITION: position, METADATA_METRICS: metrics}
        self._writer.outlast(holds)
        try:
            return self._writer.take(
                named, place=place, step=step, notes=notes, checkpoint=False, wait=False
            )
        except CheckpointError:  # the agent has no memory for it, and has said so
            return False

    def close(self) -> None:
        """Let go of the buffers; the agent keeps what they hold."""
        if self._writer is not None:
            self._writer.close()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
