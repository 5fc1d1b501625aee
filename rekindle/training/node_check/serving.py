"""The process that checks one device: it does its agent's tasks until the agent disconnects.

The agent forks it in the same way as a rank, with a rank's environment. A process that has failed
ends, so the effects of a failed collective do not matter. The agent then starts another one.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from rekindle import names
from rekindle.protocol.node_check import DeviceWork, Done, Meet, Open, Task
from rekindle.rank.channel import MAX_MESSAGE
from rekindle.recovery.node_check.evidence import lacks_memory

NAME = "rekindle-check"  # the name in lists of processes
WINDOWS = 5
ONES = 64  # ones in a row of a matrix: a device adds this many numbers exactly in every type
# Errors of a framework, a lower library or the host; torch.OutOfMemoryError is a RuntimeError.
_FAILURES = (RuntimeError, MemoryError, OSError)
_TASK: msgspec.msgpack.Decoder[Task] = msgspec.msgpack.Decoder(Task)


class WrongResultError(RuntimeError):
    """A device has computed or copied wrongly, or a collective has returned wrong values."""


class Kit(Protocol):
    """Measures a device. port: where checkers of other nodes meet this checker; 0: they do not."""

    @property
    def port(self) -> int: ...

    def work(self, task: DeviceWork) -> Done: ...

    def meet(self, task: Meet) -> Done: ...


def serve(open_device: Callable[[int], Kit]) -> None:
    """Open the device of this local rank, and do the agent's tasks."""
    Path("/proc/self/comm").write_text(NAME)
    connection = socket.socket(fileno=int(os.environ[names.ENV_CHANNEL_FD]))
    try:
        kit = open_device(int(os.environ["LOCAL_RANK"]))
    except _FAILURES as error:
        _fail(connection, 0, error)
    connection.send(msgspec.msgpack.encode(Open(port=kit.port)))
    while data := connection.recv(MAX_MESSAGE):
        task = _TASK.decode(data)
        try:
            done = kit.work(task) if isinstance(task, DeviceWork) else kit.meet(task)
        except _FAILURES as error:
            _fail(connection, task.serial, error)
        connection.send(msgspec.msgpack.encode(done))
    os._exit(0)  # the threads of a store would otherwise wait for its clients


def _fail(connection: socket.socket, serial: int, error: Exception) -> NoReturn:
    lines = f"{type(error).__name__}: {str(error).strip()}".splitlines()
    # A library may report the lack of memory on a later line than the failed operation.
    text = next(filter(lacks_memory, lines), lines[0])
    connection.send(msgspec.msgpack.encode(Done(serial=serial, error=text)))
    os._exit(1)


def timed(once: Callable[[], object], wait: Callable[[], None], window_s: float) -> float:
    """Return the seconds of one call of `once`, from the better windows.

    A permanently slow device slows each window. Other work on the machine slows only some windows.
    """
    once()
    wait()
    laps = []
    for _ in range(WINDOWS):
        began, count = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - began) < window_s:
            for _ in range(4):
                once()
            count += 4
            wait()
        laps.append(elapsed_s / count)
    return better(laps)


def better(laps: list[float]) -> float:
    """Return the upper limit of the fastest quarter of the laps."""
    return statistics.quantiles(laps, n=4)[0]
