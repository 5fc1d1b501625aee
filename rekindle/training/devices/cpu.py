"""The host as a device: nothing to stop or to repair; memory faults are pretended."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rekindle.recovery.faults.fault import Kind
from rekindle.training.devices.base import Damage, Mark


class CpuDevice:
    """Real memory faults of the host end the process (SIGBUS), so what raises one is an injection.

    pretended: the damage that the next one has done.
    """

    pretended = Damage.STATE

    def stop(self) -> None:
        """Nothing runs there but the main thread itself."""

    def wait(self) -> None:
        """What was asked for has been done."""

    def clock_us(self) -> int:
        """The host's: its errors tell no time."""
        return time.time_ns() // 1000

    def mark(self) -> Mark | None:
        """What was asked for has been done."""
        return None

    def free(self) -> None:
        """Memory is the process's own."""

    def repair(self, kind: Kind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Pretend."""
        return CpuDevice.pretended if kind is Kind.DEVICE_MEMORY else Damage.NONE
