"""An NVIDIA GPU: a CUDA context survives a broken link, but no memory fault."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from rekindle.recovery.faults.fault import Kind
from rekindle.training.devices.base import Damage, Mark


class CudaDevice:
    """Uncorrectable ECC errors are sticky: each later call in the process fails as well (CUDA
    runtime API, cudaErrorECCUncorrectable), so only a new process can go on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stop(self) -> None:
        """Aborting NCCL's communicators ends what waits for peers; kernels end by themselves."""

    def wait(self) -> None:
        """Wait for all kernels; their errors are raised here."""
        torch.cuda.synchronize(self._device)

    def clock_us(self) -> int:
        """The host's: its errors tell no time."""
        return time.time_ns() // 1000

    def mark(self) -> Mark:
        """Of the stream that computes."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def free(self) -> None:
        """Empty the allocator's cache."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()

    def repair(self, kind: Kind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """See whether the context still works, and give back what the broken step held."""
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return Damage.DEVICE
        return Damage.DEVICE if kind is Kind.DEVICE_MEMORY else Damage.NONE
