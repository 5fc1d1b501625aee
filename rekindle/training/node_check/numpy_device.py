"""The device of a checker without PyTorch: an NPU through MindSpore, or the processor."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import numpy as np

from rekindle.job.ascend import count_npus
from rekindle.training.node_check.serving import timed

Matrix = np.ndarray[Any, np.dtype[Any]]  # NumPy's float32, or a device's result for it
Numbers = np.ndarray[Any, np.dtype[np.int64]]


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
