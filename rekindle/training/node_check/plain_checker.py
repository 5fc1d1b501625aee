"""Checks a node where there is no PyTorch: its processor, its memory, and TCP to other nodes.

That is what MindSpore's ranks compute and send with on CPU. NPUs are not measured by it.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np

from rekindle.recovery.node_check.evidence import Part
from rekindle.runtime.check_messages import Done, Meet, Work
from rekindle.training.gate import Listener, call, receive
from rekindle.training.node_check.serving import WINDOWS, WrongResultError, better, serve, timed

SIZE = 256  # rows and columns of the matrices
COPIED, SENT = 8 << 20, 1 << 20  # bytes of a copy, and of what each rank sends
WINDOW_S = 0.02

_Array = np.ndarray[Any, np.dtype[np.float32]]


class PlainKit:
    """Products and copies by NumPy; ranks send to the first of them, and get the sum from it."""

    def __init__(self, local_rank: int) -> None:
        self._listener = Listener() if local_rank == 0 else None
        self._lines: list[socket.socket] = []

    @property
    def port(self) -> int:
        """Where others reach the first checker of its node."""
        return self._listener.port if self._listener else 0

    def work(self, task: Work) -> Done:
        """Measure the host by itself. Raises WrongResultError."""
        return Done(serial=task.serial, seconds={Part.COMPUTE: _compute(), Part.MEMORY: _memory()})

    def meet(self, task: Meet) -> Done:
        """Measure a sum over all ranks. Raises WrongResultError; OSError: others are not there."""
        lines = self._lines = self._connect(task)
        laps = []
        for lap in range(2 * WINDOWS):
            own = np.full(SENT // 4, float(task.rank + 1 + lap), np.float32)
            began = time.perf_counter()
            summed = _sum(own, lines, first=task.rank == 0)
            laps.append(time.perf_counter() - began)
            if not (summed == sum(range(1 + lap, task.world_size + 1 + lap))).all():
                raise WrongResultError("a collective has brought wrong values")
        # Not where it fails: what has gone wrong is said before others notice.
        self.hang_up()
        return Done(serial=task.serial, seconds={task.part: better(laps)})

    def hang_up(self) -> None:
        """Close the lines to others."""
        for line in self._lines:
            line.close()

    def _connect(self, task: Meet) -> list[socket.socket]:
        """Lines to all others, of the first rank; of any other one to it."""
        if task.rank:
            return [call((task.host, task.port), task.serial, task.rank, 1)]
        assert self._listener is not None
        self._listener.forget_before(task.serial)
        others = range(1, task.world_size)
        # Whoever waits in vain is ended by its agent.
        return [self._listener.take(task.serial, rank, 1, lambda: False) for rank in others]


def _compute() -> float:
    chance = np.random.default_rng(20)
    left = (chance.random((SIZE, SIZE)) < 0.25).astype(np.float32)
    right = chance.integers(-1, 2, (SIZE, SIZE)).astype(np.float32)
    product = np.empty_like(left)
    seconds = timed(lambda: np.matmul(left, right, out=product), _nothing, WINDOW_S)
    # Small whole numbers: exact in any order.
    expected = left.astype(np.int64) @ right.astype(np.int64)
    if not (product == expected).all():
        raise WrongResultError("a product of matrices is wrong")
    return seconds


def _memory() -> float:
    pattern = np.arange(COPIED // 8, dtype=np.int64)
    copy = np.empty_like(pattern)
    seconds = timed(lambda: np.copyto(copy, pattern), _nothing, WINDOW_S)
    if not (copy == np.arange(COPIED // 8)).all():
        raise WrongResultError("what was copied in memory is wrong")
    return seconds


def _sum(own: _Array, lines: list[socket.socket], *, first: bool) -> _Array:
    """Return the sum of what all ranks have."""
    if not first:
        lines[0].sendall(own.data)
        return _received(lines[0])
    total = own.copy()
    for line in lines:
        total += _received(line)
    for line in lines:
        line.sendall(total.data)
    return total


def _received(line: socket.socket) -> _Array:
    return np.frombuffer(receive(line, SENT), np.float32)


def _nothing() -> None:
    """A processor is done when it returns."""


if __name__ == "__main__":
    serve(PlainKit)
