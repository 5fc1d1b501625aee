"""Choose the device that a checker measures, and a suitable amount of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_PASSED, _SICK = 0, 2  # answers of stress_detect


class SickDeviceError(RuntimeError):
    """The device's own diagnosis has found a hardware fault."""


class Bench(NamedTuple):
    """A device, and the work for its measurement; by default, an accelerator's work.

    size: rows and columns of the matrices. dtype: the type of their elements. copied, sent: bytes
    of a copy in memory, and of a collective. backend: for collectives. wait: waits until all work
    is done.
    window_s: the shortest duration of one measurement, in seconds.
    """

    device: torch.device
    backend: str
    wait: Callable[[], None]
    size: int = 8192
    dtype: torch.dtype = torch.bfloat16
    copied: int = 1 << 30
    sent: int = 64 << 20
    window_s: float = 0.2

    def lighter(self) -> Bench:
        """Return work with little memory, for a device whose memory is used by ranks.

        The copy is still larger than a device's caches.
        """
        if self.device.type == "cpu":
            return self
        return self._replace(size=4096, copied=128 << 20, sent=8 << 20)


def bench_for(local_rank: int) -> Bench:
    """Return the measurement for this local rank's device; without accelerators, for the CPU.

    An accelerator's work is large enough to keep it busy. It is small compared with DLRover's 500
    products of 16,384 rows: a window of each kind has the same length on any device.
    Raises RuntimeError: the device cannot be used.
    """
    npu = _npu()
    if npu is not None:
        npu.set_device(local_rank)
        device = torch.device("npu", local_rank)
        return Bench(device, "hccl", lambda: npu.synchronize(local_rank))
    if torch.cuda.is_available():
        there = torch.cuda.device_count()
        if local_rank >= there:
            needed = f"GPU {local_rank}, as local rank {local_rank} needs it"
            raise RuntimeError(f"torch finds {there} GPUs here, and not {needed}")
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        return Bench(device, "nccl", lambda: torch.cuda.synchronize(device))
    torch.set_num_threads(1)  # the same for each node, regardless of other work on the machine
    return Bench(
        device=torch.device("cpu"),
        backend="gloo",
        wait=lambda: None,
        size=256,
        dtype=torch.float32,
        copied=8 << 20,
        sent=1 << 20,
        window_s=0.02,
    )


def stress(local_rank: int) -> str:
    """Run an NPU's own diagnosis if torch_npu has one; return why it gave no result, or "".

    torch_npu.npu.stress_detect() answers 0 if the device passed, and 2 if the hardware is faulty.
    It answers 1 if it could not run, for example because its 10 GB of memory are not free. Source:
    torch_npu/npu/utils.py, and its page in Ascend's reference.
    Raises SickDeviceError: the hardware is faulty; RuntimeError: the diagnosis could not restore
    the voltage that it changed.
    """
    npu = _npu()
    detect = getattr(npu, "stress_detect", None)
    if detect is None:
        return ""
    found = detect()
    if found == _SICK:
        raise SickDeviceError(f"stress_detect of NPU {local_rank} finds its hardware faulty")
    return "" if found == _PASSED else f"stress_detect did not run (it returned {found})"


def _npu() -> Any:
    """Return torch_npu's module; None: there is no NPU."""
    npu = getattr(torch, "npu", None)
    return npu if npu is not None and npu.is_available() else None
