"""Device adapters: find the damage after a fault, and make a device usable in the same process.

There is one adapter for each of `cpu`, `cuda` and `npu`.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rekindle.recovery.faults.fault import FaultKind

# Answers of check_uce_in_memory().
_NONE, _OUTSIDE_POOL, _TEMPORARY, _PERSISTENT = range(4)


class Damage(str, enum.Enum):
    """The damage of a fault, in ascending order."""

    NONE = "none"  # no lasting damage: the rank can repeat the step
    STATE = "state"  # parameters or optimizer state: they must come from another source
    DEVICE = "device"  # this process cannot use the device again


class DeviceEvent(Protocol):
    """A moment in a device's queue of tasks. torch's events have this interface."""

    def query(self) -> bool:
        """Return whether the device has reached it. Raises RuntimeError: the device has a fault."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to another one."""


class Device(Protocol):
    """One rank's device. Any thread may call `stop`; only the main thread may call the rest."""

    def stop(self) -> None:
        """Abort the device's tasks. A main thread that waits for a task then raises an error."""

    def wait(self) -> None:
        """Wait until all requested tasks are done. Raises RuntimeError: a task has failed."""

    def clock_us(self) -> int:
        """Return microseconds, by the clock that the device's errors use for their times."""

    def mark(self) -> DeviceEvent | None:
        """Mark the moment when all tasks so far are done; None: they are done now."""

    def free(self) -> None:
        """Free memory that is kept for later steps: a node check needs it while this rank waits.

        It raises no error: a device with a fault reports the fault again.
        """

    def repair(self, kind: FaultKind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Make the device usable after a fault, and return the damage.

        kind: the kind of this rank's own fault; LINK if only a peer had a fault.
        state: returns the tensors of the training state. The caller writes them again after STATE.
        """


class CpuDevice:
    """The host's CPU. A memory fault of the host ends the process (SIGBUS).

    So any fault that raises an error here is injected.
    simulated_damage: the damage that the next injected fault causes.
    """

    simulated_damage = Damage.STATE

    def stop(self) -> None:
        """Do nothing: only the main thread runs on the CPU."""

    def wait(self) -> None:
        """Do nothing: all requested tasks are done."""

    def clock_us(self) -> int:
        """Return the host's time: the CPU's errors have no time."""
        return time.time_ns() // 1000

    def mark(self) -> DeviceEvent | None:
        """Return None: all requested tasks are done."""
        return None

    def free(self) -> None:
        """Do nothing: the process owns its memory."""

    def repair(self, kind: FaultKind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Return the simulated damage for a memory fault, and NONE for other faults."""
        return CpuDevice.simulated_damage if kind is FaultKind.DEVICE_MEMORY else Damage.NONE


class _Accelerator:
    """A device that does its tasks in queues, behind the host.

    runtime: torch's module for the kind of device. device: its name there.
    """

    def __init__(self, runtime: Any, device: torch.device | int) -> None:
        self._runtime, self._device = runtime, device

    def wait(self) -> None:
        """Wait for all tasks. Raises RuntimeError: a task has failed."""
        self._runtime.synchronize(self._device)

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event = self._runtime.Event(enable_timing=True)
        event.record()
        return event

    def free(self) -> None:
        """Empty the allocator's cache."""
        with contextlib.suppress(RuntimeError):
            self._runtime.empty_cache()


class CudaDevice(_Accelerator):
    """A CUDA device. Uncorrectable ECC errors are sticky, so only a new process can continue.

    After such an error each later call in the process fails (CUDA runtime API,
    cudaErrorECCUncorrectable).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.cuda, device)

    def stop(self) -> None:
        """Do nothing: aborted NCCL communicators end waits for peers; kernels end on their own."""

    def clock_us(self) -> int:
        """Return the host's time: the device's errors have no time."""
        return time.time_ns() // 1000

    def repair(self, kind: FaultKind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Check whether the context still works, and free the memory of the broken step."""
        try:
            self.wait()
            self._runtime.empty_cache()
        except RuntimeError:
            return Damage.DEVICE
        return Damage.DEVICE if kind is FaultKind.DEVICE_MEMORY else Damage.NONE


class NpuDevice(_Accelerator):
    """An Ascend NPU. stop_device aborts its tasks; a wait for one then raises "FORCE STOP"."""

    def __init__(self, device: torch.device) -> None:
        import torch_npu  # the module exists only on a machine with an NPU

        super().__init__(torch_npu.npu, device.index or 0)
        self._module = torch_npu
        self._stopped: bool | None = None  # None: no thread has called stop()

    def stop(self) -> None:
        """Abort all tasks of the device."""
        self._stopped = self._runtime.stop_device(self._device) == 0

    def clock_us(self) -> int:
        """Wait for all earlier tasks, and return the device's time from the stamp of an event."""
        return int(self.mark().recorded_time())

    def repair(self, kind: FaultKind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Clean the device and restart its communication."""
        if self._stopped is None:
            return Damage.NONE
        if not self._stopped:
            return Damage.DEVICE
        damage = Damage.NONE
        if kind is FaultKind.DEVICE_MEMORY:
            damage = _DAMAGE[self._runtime.check_uce_in_memory(self._device)]
        if damage is Damage.DEVICE:
            return damage
        gc.collect()
        self._runtime.empty_cache()
        self._runtime.restart_device(self._device)
        self._module.distributed.reinit_process_group(group=None, rebuild_link=False)
        self._stopped = None
        if damage is Damage.STATE:  # torch-npu rejects a tensor that it considers damaged
            for tensor in state():
                self._runtime._recovery.update_npu_tensor_to_safe(tensor)
        return damage


_DAMAGE = {
    _NONE: Damage.NONE,
    _OUTSIDE_POOL: Damage.DEVICE,
    _TEMPORARY: Damage.NONE,
    _PERSISTENT: Damage.STATE,
}


def device_for(device: torch.device) -> Device:
    """Return the adapter for a model's device; a type other than CUDA and NPU counts as CPU."""
    if device.type == "cuda":
        return CudaDevice(device)
    return NpuDevice(device) if device.type == "npu" else CpuDevice()
