"""A checker of a device through MindSpore. The program runs in MindSpore's environment for a test.

Its arguments are MindSpore's name of the kind of device, and the fault of the device.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import mindspore as ms
from mindspore import ops

from rekindle.training.node_check import mindspore_device
from rekindle.training.node_check.mindspore_device import MindSporeDevice
from rekindle.training.node_check.numpy_checker import PlainKit
from rekindle.training.node_check.serving import serve


def wrong_product(left: ms.Tensor, right: ms.Tensor) -> ms.Tensor:
    """Return a product with one wrong element."""
    product = ops.matmul(left, right)
    product[5, 5] += 1
    return product


def wrong_copy(self: ms.Tensor, source: ms.Tensor) -> ms.Tensor:
    """Copy nothing."""
    return self


def check(target: str, wrong: str) -> None:
    """Run the checker with a fault."""
    if wrong == "copy":
        ms.Tensor.copy_ = wrong_copy
    elif wrong == "product":
        mindspore_device.ops = SimpleNamespace(matmul=wrong_product)

    def kit(local_rank: int) -> PlainKit:
        device = MindSporeDevice(target, 0, size=256, copied=8 << 20, window_s=0.02)
        return PlainKit(local_rank, device)

    serve(kit)


if __name__ == "__main__":
    check(*sys.argv[1:])
