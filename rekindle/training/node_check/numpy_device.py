"""What a checker without PyTorch measures: an NPU through MindSpore, or the processor."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import numpy as np

from rekindle.job.ascend import count_npus
from rekindle.training.node_check.serving import timed

Matrix = np.ndarray[Any, np.dtype[Any]]  # of NumPy's float32, or what a device has made of that
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Device(Protocol):
    """What makes products and copies.

    size: rows and columns of the matrices; copied: bytes of a copy in memory. note: what is to be
    said of it, and blames no node.
    """

    size: int
    copied: int
    note: str

    def multiply(self, left: Matrix, right: Matrix) -> tuple[float, Matrix]:
        """Return the seconds of one product, and the last that was made."""

    def copy(self, pattern: Numbers) -> tuple[float, Numbers]:
        """Return the seconds of one copy in memory, and the last that was made."""


class Processor:
    """The host's, with NumPy: what MindSpore's ranks compute with on CPU."""

    size = 256
    copied = 8 << 20
    _window_s = 0.02

    def __init__(self, note: str = "") -> None:
        self.note = note

    def multiply(self, left: Matrix, right: Matrix) -> tuple[float, Matrix]:
        """Multiply, in the same memory each time."""
        product = np.empty_like(left)
        return timed(lambda: np.matmul(left, right, out=product), _done, self._window_s), product

    def copy(self, pattern: Numbers) -> tuple[float, Numbers]:
        """Copy, to the same memory each time."""
        copy = np.empty_like(pattern)
        return timed(lambda: np.copyto(copy, pattern), _done, self._window_s), copy


def _done() -> None:
    """A processor is done when it returns."""


def device_for(local_rank: int) -> Device:
    """Return the NPU of this local rank, where MindSpore can use it; else the processor.

    MindSpore is imported where there are NPUs: that takes a second, and memory.
    Raises RuntimeError: the NPU cannot be used.
    """
    if not count_npus() or importlib.util.find_spec("mindspore") is None:
        return Processor()
    from rekindle.training.node_check.mindspore_device import MindSporeDevice, knows_ascend

    if knows_ascend():
        return MindSporeDevice("Ascend", local_rank)
    # Its build, or a CANN that is not there: ranks of this environment compute on the host as well.
    return Processor("the NPUs were not measured: MindSpore cannot use them here")
