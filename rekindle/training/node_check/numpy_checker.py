"""Check a node without PyTorch: its NPU or processor, its memory, and TCP to other nodes."""

from __future__ import annotations

import importlib.util
import socket
import time
from typing import Any, Protocol

import numpy as np

from rekindle.job.ascend import count_npus
from rekindle.protocol.node_check import DeviceWork, Done, Meet
from rekindle.rank.step_vote import Listener, call, receive
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.training.node_check.serving import (
    ONES,
    WINDOWS,
    WrongResultError,
    better,
    serve,
    timed,
)

SENT = 1 << 20  # bytes that each rank sends

Matrix = np.ndarray[Any, np.dtype[Any]]  # NumPy's float32, or a device's result for it
Numbers = np.ndarray[Any, np.dtype[np.int64]]
_Array = np.ndarray[Any, np.dtype[np.float32]]


class Device(Protocol):
    """A device that makes products and copies.

    size: rows and columns of the matrices. copied: bytes of a copy in memory. note: a remark for
    the report that does not blame the node.
    """

    size: int
    copied: int
    note: str

    def multiply(self, left: Matrix, right: Matrix) -> tuple[float, Matrix]:
        """Return the seconds of one product, and the last product."""

    def copy(self, pattern: Numbers) -> tuple[float, Numbers]:
        """Return the seconds of one copy in memory, and the last copy."""


class Processor:
    """The host's processor, with NumPy: MindSpore's ranks on CPU compute on the same processor."""

    size = 256
    copied = 8 << 20
    _window_s = 0.02

    def __init__(self, note: str = "") -> None:
        self.note = note

    def multiply(self, left: Matrix, right: Matrix) -> tuple[float, Matrix]:
        """Return the seconds of one product, and the last product; all use the same memory."""
        product = np.empty_like(left)
        return timed(lambda: np.matmul(left, right, out=product), _done, self._window_s), product

    def copy(self, pattern: Numbers) -> tuple[float, Numbers]:
        """Return the seconds of one copy, and the last copy; all copies go to the same memory."""
        copy = np.empty_like(pattern)
        return timed(lambda: np.copyto(copy, pattern), _done, self._window_s), copy


def _done() -> None:
    """Do nothing: a processor is done when the call returns."""


def device_for(local_rank: int) -> Device:
    """Return this local rank's NPU if MindSpore can use it, and the processor otherwise.

    The function imports MindSpore only on a machine with NPUs: the import takes a second, and
    memory.
    Raises RuntimeError: the NPU cannot be used.
    """
    if not count_npus() or importlib.util.find_spec("mindspore") is None:
        return Processor()
    from rekindle.training.node_check.mindspore_device import MindSporeDevice, knows_ascend

    if knows_ascend():
        return MindSporeDevice("Ascend", local_rank)
    # The build has no NPU support, or CANN is missing: ranks in this environment use the host too.
    return Processor(
        "the check did not measure the NPUs, because MindSpore cannot use them on this node"
    )


class PlainKit:
    """Make products and copies on a device; ranks send to the first rank, which returns the sum."""

    def __init__(self, local_rank: int, device: Device) -> None:
        self._device = device
        self._listener = Listener() if local_rank == 0 else None
        self._connections: list[socket.socket] = []

    @property
    def port(self) -> int:
        """The port at which others reach the first checker of its node; 0 for other checkers."""
        return self._listener.port if self._listener else 0

    def work(self, task: DeviceWork) -> Done:
        """Measure the device alone. Raises WrongResultError; RuntimeError: the device fails."""
        seconds = {
            Measurement.COMPUTE: _compute(self._device),
            Measurement.MEMORY: _memory(self._device),
        }
        return Done(serial=task.serial, seconds=seconds, note=self._device.note)

    def meet(self, task: Meet) -> Done:
        """Measure a sum over all ranks. Raises WrongResultError; OSError: others are missing."""
        connections = self._connections = self._connect(task)
        laps = []
        for lap in range(2 * WINDOWS):
            own = np.full(SENT // 4, float(task.rank + 1 + lap), np.float32)
            began = time.perf_counter()
            summed = _sum(own, connections, first=task.rank == 0)
            laps.append(time.perf_counter() - began)
            if not (summed == sum(range(1 + lap, task.world_size + 1 + lap))).all():
                raise WrongResultError("a collective returned wrong values")
        # Not after a failure: this rank reports its failure before others see closed connections.
        self.hang_up()
        return Done(serial=task.serial, seconds={task.part: better(laps)})

    def hang_up(self) -> None:
        """Close the connections to others."""
        for connection in self._connections:
            connection.close()

    def _connect(self, task: Meet) -> list[socket.socket]:
        """Return the first rank's connections to all others, or another rank's connection to it."""
        if task.rank:
            return [call((task.host, task.port), task.serial, task.rank, 1)]
        assert self._listener is not None
        self._listener.forget_before(task.serial)
        others = range(1, task.world_size)
        # The wait has no limit: the agent ends a process that waits too long.
        return [self._listener.take(task.serial, rank, 1, lambda: False) for rank in others]


def _compute(device: Device) -> float:
    shape = (device.size, device.size)
    chance = np.random.default_rng(20)
    left = (chance.random(shape, np.float32) < ONES / device.size).astype(np.float32)
    right = chance.integers(-1, 2, shape, np.int8).astype(np.float32)
    seconds, product = device.multiply(left, right)
    # Freivalds' check: A (B x) = (A B) x, with ones for x. Small integers: exact in any order.
    if not (product.sum(1, np.float64) == left @ right.sum(1)).all():
        raise WrongResultError("a product of matrices is wrong")
    return seconds


def _memory(device: Device) -> float:
    count = device.copied // 8
    seconds, copy = device.copy(np.arange(count))
    if not (copy == np.arange(count)).all():
        raise WrongResultError("a copy in memory has wrong values")
    return seconds


def _sum(own: _Array, connections: list[socket.socket], *, first: bool) -> _Array:
    """Return the sum of all ranks' arrays."""
    if not first:
        connections[0].sendall(own.data)
        return _received(connections[0])
    total = own.copy()
    for connection in connections:
        total += _received(connection)
    for connection in connections:
        connection.sendall(total.data)
    return total


def _received(connection: socket.socket) -> _Array:
    return np.frombuffer(receive(connection, SENT), np.float32)


if __name__ == "__main__":
    serve(lambda local_rank: PlainKit(local_rank, device_for(local_rank)))
