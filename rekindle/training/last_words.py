"""Last words of a rank that nobody breaks off: told to end, it gives the state of its newest step.

The main thread may sit in a collective that nobody ends, and never come back from there. So
another thread hears of SIGTERM and keeps the state, which is that of the last finished step as
long as the update of the next has not begun.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from rekindle import names

LIMIT_S = 5.0  # for an update that is under way to end; the agent kills after 10 s
_TICK_S = 0.001
_SIG_DFL = 0


class Updates(Protocol):
    """What knows how many updates have begun; None: it does not."""

    @property
    def begun(self) -> int | None: ...


class LastWords:
    """keep: keeps the state of so many steps; called by a thread of this class.

    updates: tells whether that of the step under way has begun; None: nobody can tell.
    """

    def __init__(self, updates: Updates | None, keep: Callable[[int], None]) -> None:
        self._updates = updates
        self._keep = keep
        self.apart = threading.Lock()  # held by whoever else gives the agent a state
        self._ending = threading.Event()
        self._in_step = False
        self._finished = 0
        self._pid = os.getpid()
        self._heard = self._told = -1
        main = threading.current_thread() is threading.main_thread()
        # What a script has for the signal is its own.
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._listen()

    def begin_step(self, finished: int) -> None:
        """The step's graph is about to run; no other does once this process has to end."""
        if self._ending.is_set():
            threading.Event().wait()  # the process ends beside it
        self._finished, self._in_step = finished, True

    def end_step(self, finished: int) -> None:
        """It has run."""
        self._finished, self._in_step = finished, False

    def close(self) -> None:
        """From now on the signal ends the process as ever."""
        if self._told >= 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(self._told)
            self._told = -1

    def _listen(self) -> None:
        self._heard, self._told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._heard, True)
        # Python's own handler would run in the main thread alone; the pipe is written to at once.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)  # of a loader's workers, it is not theirs
        threading.Thread(target=self._run, name="rekindle-last-words", daemon=True).start()

    def _forget(self) -> None:
        if self._told >= 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _run(self) -> None:
        while heard := os.read(self._heard, 1):
            if heard[0] == signal.SIGTERM:
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
        while not self._is_still():
            if time.monotonic() > deadline:
                return
            time.sleep(_TICK_S)
        step = self._finished
        with suppress(OSError), socket.socket(socket.AF_UNIX) as claim:
            claim.bind(_claim_of(step))  # all ranks have the same state: one of a node is enough
            with self.apart:
                self._keep(step)

    def _is_still(self) -> bool:
        begun = self._updates.begun if self._updates else None
        return not self._in_step or begun == self._finished


def _claim_of(step: int) -> str:
    """Return the name of a socket that one process of a node can have at a time."""
    said = (os.environ.get(name, "") for name in (names.ENV_JOB_ID, names.ENV_NODE_RANK))
    return "\0rekindle-last-words-" + "-".join((*said, str(os.getppid()), str(step)))
