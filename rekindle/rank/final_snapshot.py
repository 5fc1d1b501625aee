"""Last words of a rank that nobody breaks off: told to end, it gives the state of its newest step.

The main thread may sit in a collective that nobody ends, and never come back from there. So
another thread hears of SIGTERM and keeps the state, which is that of the last finished step as
long as the update of the next has not begun.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rekindle import names

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


class LastWords:
    """keep: keeps the state of this moment, and says whether it could; called by a thread of ours.

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
        main = threading.current_thread() is threading.main_thread()
        # What a script has for the signal is its own.
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._listen()

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

    def _listen(self) -> None:
        self._heard, self._told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._heard, True)
        # Python's own handler would run in the main thread alone; the pipe is written to at once.
        signal.signal(signal.SIGTERM, _leave_it_to_the_thread)
        signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)  # of a loader's workers, it is not theirs
        threading.Thread(target=self._run, name="rekindle-last-words", daemon=True).start()

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
    return "\0rekindle-last-words-" + "-".join((*said, str(os.getppid()), str(step)))
