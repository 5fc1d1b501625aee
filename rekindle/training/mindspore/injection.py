"""Faults that a MindSpore rank inflicts upon itself because it was told to (`rekindle inject`).

All of them strike before the rank passes the gate of a step. A graph cannot be broken off in its
middle on CPU; on Ascend, where it can, MindSpore's own errors come from there.
"""

from __future__ import annotations

import os

import mindspore
from mindspore import nn, ops

from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.rank.injection import break_process, due
from rekindle.training.mindspore.state import Parameters


class DeviceMemoryError(RuntimeError):
    """The memory of the rank's device is damaged, and with it its state."""


class _Alone(nn.Cell):  # type: ignore[misc]  # MindSpore is not there where types are checked
    """A collective."""

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce()

    def construct(self, value: mindspore.Tensor) -> mindspore.Tensor:
        return self.all_reduce(value)


def suffer(faults: list[Inject], step: int, parameters: Parameters) -> DeviceMemoryError | None:
    """Suffer those of `faults` that are due in `step`, and take them off the list.

    Return what broke the state. Raises what is the script's own.
    """
    for fault, told in due(faults, step):
        match fault.kind:
            case InjectionKind.UCE | InjectionKind.TORN_UPDATE:
                parameters.spoil()
                return DeviceMemoryError(f"UCE ERROR {told}")
            case InjectionKind.HANG_COLLECTIVE:
                _Alone()(mindspore.Tensor([1.0], mindspore.float32))
            case InjectionKind.HANG_DATA:
                os.read(os.pipe()[0], 1)
            case InjectionKind.OOM:
                raise MemoryError(f"out of memory was {told}")
            case _ if not break_process(fault):
                raise RuntimeError(f"an exception was {told}")
    return None
