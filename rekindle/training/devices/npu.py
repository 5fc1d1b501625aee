"""An Ascend NPU, through torch-npu's recovery functions, in the order in which MindIO calls them.

It cannot run without the device. `tests/unit/training/devices/test_npu.py` compares each call with
the source of the released torch-npu.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch

from rekindle.recovery.faults.fault import Kind
from rekindle.training.devices.base import Damage

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

    def repair(self, kind: Kind, state: Callable[[], list[torch.Tensor]]) -> Damage:
        """Clean the device and take its communication up again."""
        module = _torch_npu()
        if self._stopped is None:
            return Damage.NONE
        if not self._stopped:
            return Damage.DEVICE
        damage = Damage.NONE
        if kind is Kind.DEVICE_MEMORY:
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
