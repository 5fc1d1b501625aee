"""Writes down where a rank's time goes, from the step on in which it was asked to.

A range costs training two looks at the clock and one entry of a list; another thread encodes and
writes. Times are the host's: a framework that knows a device's own writes down those.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rekindle import names
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

END_S = 2.0  # for what is left when it goes off; storage that hangs has no more
MOST_WAITING = 200_000  # ranges; where the disk is slower than training the oldest are lost


class Profiler:
    """The records of one rank. slot: its number in the full world; device: its own on the node.

    Without an agent nobody asks for any.
    """

    def __init__(self, slot: int, device: int) -> None:
        self.on = Switch()
        folder = rank_environment.path(names.ENV_PROFILING)
        self._folder = records_folder(os.environ, folder) if folder is not None else None
        self._limits = limits_in(os.environ)
        self._slot = slot
        self._asked = Profile()
        self._waiting: collections.deque[_Entry] = collections.deque(maxlen=MOST_WAITING)
        self._encoder = Encoder(os.getpid(), device)
        self._step, self._began, self._forward, self._loads = -1, 0, 0, 0
        self._writer: _Writer | None = None

    def begin_step(self, step: int, asked: Profile) -> None:
        """A step's body begins, for the first time or again. asked: what is to be written down."""
        if asked is not self._asked:
            self._handle_orders(asked)
        if self.on.step:
            self._step, self._began = step, time.time_ns()

    def end_step(self) -> None:
        """It has ended well."""
        if self._step >= 0:
            self._add(f"{STEP} {self._step}", DEFAULT, self._began)
            self._step = -1

    def begin_forward(self, *_: object) -> None:
        """A forward pass begins: a hook of the model's."""
        self._forward = time.time_ns()

    def end_forward(self, *_: object) -> None:
        """It has ended; those outside of a step, of an evaluation, are not training's."""
        if self.on.forward and self._forward and self._step >= 0:
            self.add_forward(self._forward)
        self._forward = 0

    def add_forward(self, began: int) -> None:
        """Write a forward pass down that has just ended; nanoseconds since the epoch."""
        self._add(FORWARD, DEFAULT, began)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The rank waits for its batch."""
        began = time.time_ns()
        yield
        if self.on.data_loader and self._step >= 0:
            self._add(DATA_LOADER, DEFAULT, began)

    def begin_loading(self) -> None:
        """From now on the rank waits for the batch of a step that has not begun."""
        self._loads = time.time_ns() if self.on.data_loader else 0

    def end_loading(self) -> None:
        """It has the batch."""
        if self._loads:
            self._add(DATA_LOADER, DEFAULT, self._loads)
        self._loads = 0

    def saved(self, began: int) -> None:
        """State was kept, since then; nanoseconds since the epoch."""
        if self.on.save_checkpoint:
            self._add(SAVE, DEFAULT, began)

    def joined(self, operation: Operation) -> Callable[[], None]:
        """The rank has joined a collective; return what is to be called when that is done.

        It is written down at once: of a rank that hangs it is to be seen where it waits. By any
        thread.
        """
        joined = _Joined(operation_name(operation), time.time_ns(), threading.get_ident())
        self._waiting.append(joined)
        return lambda: self._waiting.append(_Done(joined, time.time_ns()))

    def close(self) -> None:
        """Write what is left."""
        self._handle_orders(Profile())

    def switched(self) -> None:
        """What is on has changed: the place to hook into a framework, or out of it."""

    def _add(self, name: str, domain: str, began: int) -> None:
        self.keep(Range(name, domain, began, time.time_ns()))

    def keep(self, made: Range) -> None:
        """Have it written, behind those that were kept before."""
        self._waiting.append((made, threading.get_ident()))

    def _handle_orders(self, asked: Profile) -> None:
        self._asked, self._step = asked, -1
        is_asked = bool(asked.switch.words) and self._folder is not None
        if self._writer is not None and not is_asked:
            self._writer.end()
            self._writer = None
        elif self._writer is None and is_asked:
            assert self._folder is not None
            task = task_folder(self._folder, os.environ.get(ENV_TASK, ""), asked.since)
            # A writer whose storage hangs may still have the others.
            self._waiting = collections.deque(maxlen=MOST_WAITING)
            files = RecordFiles(task / str(self._slot), self._limits.file_bytes)
            self._writer = _Writer(files, self._limits.flush_s, self._waiting, self._encoder)
        self.on = asked.switch if is_asked else Switch()
        self.switched()


class _Joined:
    """A collective that was joined. number: its Id, when that was written."""

    def __init__(self, name: str, at: int, thread: int) -> None:
        self.name, self.at, self.thread = name, at, thread
        self.number = 0


class _Done(NamedTuple):
    """It is done."""

    joined: _Joined
    at: int


_Entry = tuple[Range, int] | _Joined | _Done


class _Writer:
    """The thread that writes, each `flush_s`."""

    def __init__(
        self,
        files: RecordFiles,
        flush_s: float,
        waiting: collections.deque[_Entry],
        encoder: Encoder,
    ) -> None:
        self._files, self._flush_s = files, flush_s
        self._waiting = waiting
        self._encoder = encoder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rekindle-profile", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write the rest, and wait for that: not longer than training may stand still for it."""
        self._over.set()
        self._thread.join(END_S)
        if self._thread.is_alive():
            print("rekindle: records are not written yet; training goes on", file=sys.stderr)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._flush_s):
                self._flush()
            self._flush()
        except OSError as error:
            # Training is worth more than what is known about it.
            print(f"rekindle: nothing is written down any more: {error}", file=sys.stderr)
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
            case (made, thread):
                return self._encoder.lines(made, thread)
