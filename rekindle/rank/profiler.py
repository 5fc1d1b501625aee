"""Records the time of a rank's operations, from the first step after an order.

For a range, training reads the clock twice and appends one entry to a list. Another thread encodes
and writes the entries. Times are the host's; a framework may record a device's own times.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rekindle import names
from rekindle.console import say
from rekindle.profiling.files import ENV_TASK, RecordFiles, records_folder, task_folder
from rekindle.profiling.markers import (
    COMMUNICATION,
    DATA_LOADER,
    DEFAULT,
    FORWARD,
    SAVE,
    STEP,
    Encoder,
    Operation,
    Range,
    operation_name,
)
from rekindle.profiling.switch import Switch, limits_in
from rekindle.protocol.rank import Profile
from rekindle.rank import environment as rank_environment

END_S = 2.0  # to write the rest at the end; a hanging storage gets no more time
MOST_WAITING = 200_000  # ranges; if the disk is slower than training, the oldest ranges are lost


class Profiler:
    """The records of one rank. slot: its number in the full world; device: its number on the node.

    Without an agent no orders to record arrive.
    """

    def __init__(self, slot: int, device: int) -> None:
        self.on = Switch()
        self._slot, self._device = slot, device
        self._asked = Profile()
        self._waiting: collections.deque[_Entry] = collections.deque(maxlen=MOST_WAITING)
        self._step, self._began, self._forward, self._loads = -1, 0, 0, 0
        self._writer: _Writer | None = None

    def begin_step(self, step: int, asked: Profile) -> None:
        """Record that a step's body begins, for the first time or again. asked: the order."""
        if asked is not self._asked:  # also once for each generation
            self._handle_orders(asked)
        if self.on.step:
            self._step, self._began = step, time.time_ns()

    def end_step(self) -> None:
        """Record that the step has ended without an error."""
        if self._step >= 0:
            self._add(f"{STEP} {self._step}", DEFAULT, self._began)
            self._step = -1

    def begin_forward(self, *_: object) -> None:
        """Record that a forward pass begins; a hook of the model calls this."""
        self._forward = time.time_ns()

    def end_forward(self, *_: object) -> None:
        """Record that the pass ends; ignore one outside of a step, such as an evaluation."""
        if self.on.forward and self._forward and self._step >= 0:
            self.add_forward(self._forward)
        self._forward = 0

    def add_forward(self, began: int) -> None:
        """Add a forward pass that has just ended. began: nanoseconds since the epoch."""
        self._add(FORWARD, DEFAULT, began)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Record a block in which the rank waits for its batch."""
        began = time.time_ns()
        yield
        if self.on.data_loader and self._step >= 0:
            self._add(DATA_LOADER, DEFAULT, began)

    def begin_loading(self) -> None:
        """Record that the rank begins to wait for the batch of a step that has not begun."""
        self._loads = time.time_ns() if self.on.data_loader else 0

    def end_loading(self) -> None:
        """Record that the rank has the batch."""
        if self._loads:
            self._add(DATA_LOADER, DEFAULT, self._loads)
        self._loads = 0

    def saved(self, began: int) -> None:
        """Record that the rank has saved its state. began: nanoseconds since the epoch."""
        if self.on.save_checkpoint:
            self._add(SAVE, DEFAULT, began)

    def joined(self, operation: Operation) -> Callable[[], None]:
        """Record that the rank has joined a collective; return a function to call at its end.

        The writer does not wait for the end, so the records show where a hanging rank waits. Any
        thread may call this.
        """
        joined = _Joined(operation_name(operation), time.time_ns(), threading.get_ident())
        self._waiting.append(joined)
        return lambda: self._waiting.append(_Done(joined, time.time_ns()))

    def close(self) -> None:
        """Write the remaining records."""
        self._handle_orders(Profile())

    def switched(self) -> None:
        """React to a changed switch; a framework can add or remove its hooks here."""

    def _add(self, name: str, domain: str, began: int) -> None:
        self.keep(Range(name, domain, began, time.time_ns()))

    def keep(self, span: Range) -> None:
        """Queue a range for the writer, after the earlier ones."""
        self._waiting.append((span, threading.get_ident()))

    def _handle_orders(self, asked: Profile) -> None:
        self._asked, self._step = asked, -1
        own = rank_environment.path(names.ENV_PROFILING)
        is_asked = asked.switch != Switch() and own is not None
        if self._writer is not None and not is_asked:
            self._writer.end()
            self._writer = None
        elif self._writer is None and own is not None and is_asked:
            folder, limits = records_folder(os.environ, own), limits_in(os.environ, say)
            task = task_folder(folder, os.environ.get(ENV_TASK, ""), asked.since)
            # A former writer whose storage hangs may still use the old queue.
            self._waiting = collections.deque(maxlen=MOST_WAITING)
            files = RecordFiles(task / str(self._slot), limits.file_bytes)
            self._writer = _Writer(files, limits.flush_s, self._waiting, self._device)
        self.on = asked.switch if is_asked else Switch()
        self.switched()


class _Joined:
    """A started collective. number: its Id, once it is written."""

    def __init__(self, name: str, at: int, thread: int) -> None:
        self.name, self.at, self.thread = name, at, thread
        self.number = 0


class _Done(NamedTuple):
    """The end of a collective."""

    joined: _Joined
    at: int


_Entry = tuple[Range, int] | _Joined | _Done


class _Writer:
    """The thread that writes the records, every `flush_s` seconds."""

    def __init__(
        self,
        files: RecordFiles,
        flush_s: float,
        waiting: collections.deque[_Entry],
        device: int,
    ) -> None:
        self._files, self._flush_s = files, flush_s
        self._waiting = waiting
        self._encoder = Encoder(os.getpid(), device)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rekindle-profile", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write the rest, and wait for at most END_S, because training waits."""
        self._over.set()
        self._thread.join(END_S)
        if self._thread.is_alive():
            say("the rank has not written all profiling records yet; training continues")

    def _run(self) -> None:
        try:
            while not self._over.wait(self._flush_s):
                self._flush()
            self._flush()
        except OSError as error:
            # Records must not stop the training.
            say(f"the rank no longer writes profiling records: {error}")
        self._files.close()

    def _flush(self) -> None:
        lines = []
        while self._waiting:
            lines.append(self._encode(self._waiting.popleft()))
        if lines:
            self._files.append(b"".join(lines))

    def _encode(self, entry: _Entry) -> bytes:
        match entry:
            case _Joined(name=name):
                entry.number, line = self._encoder.begin(
                    name, COMMUNICATION, entry.at, entry.thread
                )
                return line
            case _Done(joined, at):
                number, name, thread = joined.number, joined.name, joined.thread
                return self._encoder.end(number, name, COMMUNICATION, at, thread)
            case (span, thread):
                return self._encoder.lines(span, thread)
