"""The device that a checker measures, and how much work suits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_PASSED, _SICK = 0, 2  # answers of stress_detect


class SickDeviceError(RuntimeError):
    """The device's own diagnosis has found a fault of its hardware."""


class Bench(NamedTuple):
    """A device, and the work that is measured on it.

    size: rows and columns of the matrices; dtype: of their elements. copied, sent: bytes of a copy
    in memory, and of a collective. backend: for collectives. wait: until all work is done.
    window_s: how long one measurement goes on at least.
    """

    device: torch.device
    backend: str
    size: int
    dtype: torch.dtype
    copied: int
    sent: int
    window_s: float
    wait: Callable[[], None]

    def lighter(self) -> Bench:
        """Return what takes little memory, for a device whose memory ranks hold.

        What is copied is still more than a device's caches hold.
        """
        if self.device.type == "cpu":
            return self
        return self._replace(size=4096, copied=128 << 20, sent=8 << 20)


def bench_for(local_rank: int) -> Bench:
    """Return what is measured on the device of this local rank; without accelerators, the CPU.

    Work of an accelerator's is large enough to keep it busy, and small beside DLRover's 500
    products of 16,384 rows: a window of each kind lasts as long on any.
    Raises RuntimeError: the device cannot be used.
    """
    npu = _npu()
    if npu is not None:
        npu.set_device(local_rank)
        device = torch.device("npu", local_rank)
        return _accelerator(device, "hccl", lambda: npu.synchronize(local_rank))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        return _accelerator(device, "nccl", lambda: torch.cuda.synchronize(device))
    torch.set_num_threads(1)  # the same for each node, whatever else runs on the machine
    return Bench(
        device=torch.device("cpu"),
        backend="gloo",
        size=256,
        dtype=torch.float32,
        copied=8 << 20,
        sent=1 << 20,
        window_s=0.02,
        wait=lambda: None,
    )


def _accelerator(device: torch.device, backend: str, wait: Callable[[], None]) -> Bench:
    return Bench(
        device=device,
        backend=backend,
        size=8192,
        dtype=torch.bfloat16,
        copied=1 << 30,
        sent=64 << 20,
        window_s=0.2,
        wait=wait,
    )


def stress(local_rank: int) -> str:
    """Have an NPU's own diagnosis run where torch_npu has one; return why nothing came of it.

    Source: torch_npu.npu.stress_detect() (torch_npu/npu/utils.py, and the page on it in Ascend's
    reference) answers 0: passed; 1: it could not be carried out, as where its 10 GB of memory are
    not to be had; 2: the hardware is faulty. It raises RuntimeError where the voltage that it has
    changed could not be set back. Raises SickDeviceError as well.
    """
    npu = _npu()
    detect = getattr(npu, "stress_detect", None)
    if detect is None:
        return ""
    found = detect()
    if found == _SICK:
        raise SickDeviceError(f"stress_detect of NPU {local_rank} finds its hardware faulty")
    return "" if found == _PASSED else f"stress_detect was not carried out (its answer is {found})"


def _npu() -> Any:
    """torch_npu's module, where there is an NPU."""
    npu = getattr(torch, "npu", None)
    return npu if npu is not None and npu.is_available() else None
