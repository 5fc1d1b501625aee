"""Device adapters: CPU, CUDA, Ascend NPU."""

from __future__ import annotations

import contextlib
import enum
import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rekindle.recovery.faults.fault import FaultKind


class Damage(str, enum.Enum):
    """What a fault has damaged, least first."""

    NONE = "none"  # nothing that lasts: the step can be done again
    STATE = "state"  # parameters or optimizer state: they have to come from elsewhere
    DEVICE = "device"  # the device cannot be used again by this process


class DeviceEvent(Protocol):
    """A moment in what a device was asked to do: torch's events are such."""

    def query(self) -> bool:
        """Whether it is over. Raises RuntimeError: the device has a fault."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from it to another one."""


class Device(Protocol):
    """One rank's device. `stop` is for any thread, the rest for the main thread."""

    def stop(self) -> None:
        """Abort what runs there, so that a main thread that waits for it raises."""

    def wait(self) -> None:
        """Wait until all that was asked of it is done. Raises RuntimeError: what went wrong."""

    def clock_us(self) -> int:
        """Microseconds, by the clock that the device's errors tell their time in."""

    def mark(self) -> DeviceEvent | None:
        """Mark the moment when all that was asked of it so far is done; None: that is now."""

    def free(self) -> None:
        """Give back memory that is kept for later steps: while this rank waits, a check needs it.

        Raises nothing: a device that has a fault tells of it again.
        """

    def repair(self, kind: FaultKind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Make the device usable after a fault, and say what is lost.

        kind: of this rank's own fault; LINK where only a peer had one.
        state: gives the tensors of the training state, which are written anew after STATE.
        """


class CpuDevice:
    """Real memory faults of the host end the process (SIGBUS), so what raises one is an injection.

    simulated: the damage that the next one has done.
    """

    simulated_damage = Damage.STATE

    def stop(self) -> None:
        """Nothing runs there but the main thread itself."""

    def wait(self) -> None:
        """What was asked for has been done."""

    def clock_us(self) -> int:
        """The host's: its errors tell no time."""
        return time.time_ns() // 1000

    def mark(self) -> DeviceEvent | None:
        """What was asked for has been done."""
        return None

    def free(self) -> None:
        """Memory is the process's own."""

    def repair(self, kind: FaultKind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Pretend."""
        return CpuDevice.simulated_damage if kind is FaultKind.DEVICE_MEMORY else Damage.NONE


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

    def mark(self) -> DeviceEvent:
        """Of the stream that computes."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def free(self) -> None:
        """Empty the allocator's cache."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()

    def repair(self, kind: FaultKind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """See whether the context still works, and give back what the broken step held."""
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return Damage.DEVICE
        return Damage.DEVICE if kind is FaultKind.DEVICE_MEMORY else Damage.NONE


# What check_uce_in_memory() answers.
_NONE, _OUTSIDE_POOL, _TEMPORARY, _PERSISTENT = range(4)


class NpuDevice:
    """stop_device aborts the device's tasks; whoever waits for one then raises "FORCE STOP"."""

    def __init__(self, device: torch.device) -> None:
        self._index: int = device.index if device.index is not None else 0
        self._stopped: bool | None = None  # None: nobody asked

    def stop(self) -> None:
        """Abort all tasks of the device."""
        npu = _torch_npu().npu
        self._stopped = npu.stop_device(self._index) == 0

    def wait(self) -> None:
        """Wait for all tasks; their errors are raised here."""
        _torch_npu().npu.synchronize(self._index)

    def clock_us(self) -> int:
        """The device's, as an event is stamped with it; all tasks before are waited for."""
        return int(self.mark().recorded_time())

    def mark(self) -> Any:
        """Of the stream that computes."""
        event = _torch_npu().npu.Event(enable_timing=True)
        event.record()
        return event

    def free(self) -> None:
        """Empty the allocator's cache."""
        with contextlib.suppress(RuntimeError):
            _torch_npu().npu.empty_cache()

    def repair(self, kind: FaultKind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Clean the device and take its communication up again."""
        module = _torch_npu()
        if self._stopped is None:
            return Damage.NONE
        if not self._stopped:
            return Damage.DEVICE
        damage = Damage.NONE
        if kind is FaultKind.DEVICE_MEMORY:
            damage = _DAMAGE[module.npu.check_uce_in_memory(self._index)]
        if damage is Damage.DEVICE:
            return damage
        gc.collect()
        module.npu.empty_cache()
        module.npu.restart_device(self._index)
        module.distributed.reinit_process_group(group=None, rebuild_link=False)
        self._stopped = None
        if damage is Damage.STATE:  # torch-npu refuses to touch a tensor that it believes damaged
            for tensor in state():
                module.npu._recovery.update_npu_tensor_to_safe(tensor)
        return damage


_DAMAGE = {
    _NONE: Damage.NONE,
    _OUTSIDE_POOL: Damage.DEVICE,
    _TEMPORARY: Damage.NONE,
    _PERSISTENT: Damage.STATE,
}


def _torch_npu() -> Any:
    import torch_npu  # there is one only where there is an NPU

    return torch_npu
