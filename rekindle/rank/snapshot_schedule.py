"""Takes a rank's snapshots: after steps, and when the rank must end."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from rekindle import names
from rekindle.checkpoints.format import METADATA_METRICS, METADATA_POSITION
from rekindle.console import say
from rekindle.errors import CheckpointError
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.profiler import Profiler
from rekindle.rank.progress import RankPlace
from rekindle.rank.snapshot_writer import SnapshotWriter

LIMIT_S = 5.0  # for the end of a running update; the agent kills the rank after 10 s
_TICK_S = 0.001
_SIG_DFL = 0
REST_S = 600.0  # after a failure to allocate; other processes may have freed memory by then


class Updates(Protocol):
    """Shows by a changing value which updates have begun; None: the value is unknown."""

    @property
    def begun(self) -> object: ...


class Moment(NamedTuple):
    """The time of a snapshot. step: the finished steps; inside: the next step is running.

    holds: returns whether the state is still the same. The rank calls it after the copy: if the
    state has changed, the copy belongs to no step.
    """

    step: int
    inside: bool
    holds: Callable[[], bool]


class FinalSnapshot:
    """The state that a rank gives its agent when SIGTERM ends it, after a call of `listen()`.

    keep: keeps the state of a moment, and returns whether it could. Our thread calls it.
    updates: shows whether the update of the current step has begun. None: unknown.
    """

    def __init__(self, updates: Updates | None, keep: Callable[[Moment], bool]) -> None:
        self._updates = updates
        self._keep = keep
        self.apart = threading.Lock()  # held by any other code that gives the agent a state
        self._ending = threading.Event()
        self._in_step = False
        self._finished = 0
        self._begun: object = None  # before the current step
        self._pid = os.getpid()
        self._signals_read = self._signals_write = -1

    def listen(self) -> None:
        """Keep the state at SIGTERM. A script's own handler for the signal stays."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._signals_read, self._signals_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._signals_read, True)
        # Python would run its handler in the main thread only; it writes to the pipe immediately.
        signal.signal(signal.SIGTERM, _leave_it_to_the_thread)
        signal.set_wakeup_fd(self._signals_write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)  # data loader workers do not own it
        threading.Thread(target=self._run, name="rekindle-final-snapshot", daemon=True).start()

    def begin_step(self, finished: int) -> None:
        """Record that the step's graph is about to run. Block here if this process must end."""
        self._begun = self._updates.begun if self._updates else None
        # In this order: each thread sets its own flag before it reads the other's.
        self._finished, self._in_step = finished, True
        if self._ending.is_set():
            self._in_step = False
            threading.Event().wait()  # the other thread ends the process

    def end_graph(self) -> None:
        """Record that the graph has run: the state belongs to no step until `end_step`."""
        self._begun = None

    def end_step(self, finished: int) -> None:
        """Record that the step is finished, with all changes of the state."""
        self._finished, self._in_step = finished, False

    def close(self) -> None:
        """Restore the default: the signal ends the process immediately."""
        if self._signals_write >= 0:
            self._forget()
            os.close(self._signals_write)
            self._signals_write = -1

    def _forget(self) -> None:
        if self._signals_write >= 0:
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _run(self) -> None:
        while number := os.read(self._signals_read, 1):
            # A script may have replaced the handler since.
            ours = signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread
            if number[0] == signal.SIGTERM and ours:
                self._ending.set()
                try:
                    self._keep_newest()
                finally:
                    ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, _SIG_DFL)
                    os.kill(self._pid, signal.SIGTERM)
        os.close(self._signals_read)

    def _keep_newest(self) -> None:
        """Give the agent the state, if its step is known."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            step, inside = self._finished, self._in_step
            moment = Moment(step, inside, functools.partial(self._holds, step, inside))
            if moment.holds() and self._try(moment):
                return
            time.sleep(_TICK_S)

    def _try(self, moment: Moment) -> bool:
        """Keep the state of this moment; False: the moment has passed, and the next may succeed."""
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(_claim_of(moment.step))
            except OSError:
                return True  # all ranks have the same state, and another rank of the node keeps it
            with self.apart:
                kept = self._keep(moment)
        if not kept and moment.holds():
            why = "there is no space for it, or the script changed it"
            say(f"the rank could not keep the state after step {moment.step}: {why}")
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
    """Do nothing in the main thread; the other thread handles the signal."""


def _claim_of(step: int) -> str:
    """Return the name of a socket that only one process of a node can have at a time."""
    identity = (os.environ.get(name, "") for name in (names.ENV_JOB_ID, names.ENV_NODE_RANK))
    return "\0rekindle-final-snapshot-" + "-".join((*identity, str(os.getppid()), str(step)))


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
        self._make_writer = writer
        self._writer: SnapshotWriter | None = None  # until a snapshot is due
        # Replicas hold the same state: one rank of each node keeps it, and one rank of all nodes
        # writes it. This code does not know which other ranks of a node hold the same shard.
        self._keeps = rank_environment.number("LOCAL_RANK") == 0 or place.shard is not None
        self._snapshot_every = rank_environment.number(names.ENV_SNAPSHOT_EVERY)
        self._missed_checkpoint = False
        self._rests_until = 0.0
        self._checkpointed = 0  # the step of the newest checkpoint

    def is_due(self, step: int, checkpoint_every: int, *, last: bool) -> bool:
        """Return whether a rank takes a snapshot after this step; the same on all ranks.

        checkpoint_every: the value with which all ranks have begun the generation.
        """
        every = last and checkpoint_every > 0
        return every or _is_due(step, self._snapshot_every) or _is_due(step, checkpoint_every)

    def is_idle(self, step: int, checkpoint_every: int, *, last: bool) -> bool:
        """Return whether `keep` has nothing to do after this step, on no rank.

        checkpoint_every: as for is_due().
        """
        if self._channel is None:
            return True
        if self._missed_checkpoint or step < self._checkpointed:
            return False
        newest = self._channel.settings.checkpoint_every
        return not (
            self.is_due(step, checkpoint_every, last=last) or self.is_due(step, newest, last=last)
        )

    def keep(  # noqa: PLR0913  what a snapshot has
        self,
        named: Mapping[str, Any],
        *,
        place: RankPlace,
        step: int,
        last: bool,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
        whole: bool = True,
    ) -> None:
        """Take a snapshot of the state after `step` finished steps, if one is due.

        last: training ends after it. position: the start of the next step's data. metrics: those
        that the last step has logged. whole: the objects have the state of all ranks; otherwise a
        due checkpoint follows later.
        """
        if self._channel is None:
            return
        every = self._channel.settings.checkpoint_every
        if step < self._checkpointed:
            self._checkpointed = 0  # training has gone back, so the next states are different
        checkpoint = place.writes and (
            self._missed_checkpoint or _is_due(step, every) or (last and every > 0)
        )
        if last and step == self._checkpointed:
            return  # the script left its loop early, after a step with a due checkpoint
        if not checkpoint and not (self._keeps and _is_due(step, self._snapshot_every)):
            return
        if not last and time.monotonic() < self._rests_until:
            return
        if not whole:
            self._missed_checkpoint = checkpoint
            return
        self._writer = self._writer or self._make_writer(self._channel, place)
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
            # The agent has no memory for it, and has reported that. Training continues without.
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
        """Take a snapshot of the state that the end of this process may lose, if the job takes any.

        place: of the generation that did the last step. holds: returns whether the state still
        belongs to this step. A rank without other snapshots takes this one as well.
        False: the snapshot failed.
        """
        if self._channel is None or not self._snapshot_every:
            return True  # the job takes no snapshots
        notes = {METADATA_POSITION: position, METADATA_METRICS: metrics}
        self._writer = self._writer or self._make_writer(self._channel, place)
        self._writer.outlast(holds)
        try:
            return self._writer.take(
                named, place=place, step=step, notes=notes, checkpoint=False, wait=False
            )
        except CheckpointError:  # the agent has no memory for it, and has reported that
            return False

    def close(self) -> None:
        """Close the buffers; the agent keeps their contents."""
        if self._writer is not None:
            self._writer.close()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
