"""Measure a device with MindSpore's own operations.

The code follows the source of MindSpore 2.10. It ran on MindSpore's CPU device, without an NPU.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from rekindle.training.node_check.serving import timed

Matrix = np.ndarray[Any, np.dtype[Any]]  # float32, or a device's result for it
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def knows_ascend() -> bool:
    """Return whether this MindSpore can compute on NPUs: its build and the CANN decide."""
    return bool(ms.device_context.ascend.is_available())


class MindSporeDevice:
    """One device; a process that uses MindSpore then has no other device.

    The default work keeps an NPU busy. MindSpore immediately takes 2 GB of the NPU's memory, which
    is enough for this work. So less work would save no memory next to running ranks.
    """

    note = ""

    def __init__(
        self,
        target: str,
        number: int,
        *,
        size: int = 8192,
        copied: int = 256 << 20,  # more than an NPU's caches hold
        window_s: float = 0.2,
    ) -> None:
        """Open a device.

        target: MindSpore's name of a kind of devices, "Ascend" or "CPU".
        Raises RuntimeError: the device cannot be used.
        """
        ms.set_device(target, number)
        self.size, self.copied, self._window_s = size, copied, window_s

    def multiply(self, left: Matrix, right: Matrix) -> tuple[float, Matrix]:
        """Multiply in float16, which all NPUs support: integers up to 2,048 are exact in it."""
        a, b = (ms.Tensor(each.astype(np.float16)) for each in (left, right))
        product = a

        def once() -> None:
            nonlocal product
            product = ops.matmul(a, b)

        seconds = timed(once, ms.runtime.synchronize, self._window_s)
        return seconds, product.asnumpy()

    def copy(self, pattern: Numbers) -> tuple[float, Numbers]:
        """Return the seconds of one copy, and the last copy; all copies go to the same memory."""
        source, copy = ms.Tensor(pattern), ms.Tensor(np.zeros_like(pattern))
        seconds = timed(lambda: copy.copy_(source), ms.runtime.synchronize, self._window_s)
        return seconds, copy.asnumpy()
