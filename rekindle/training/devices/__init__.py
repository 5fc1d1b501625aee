"""Device adapters: find the damage after a fault, and make a device usable in the same process.

There is one adapter for each of `cpu`, `cuda` and `npu`.
"""

from __future__ import annotations

import torch

from rekindle.training.devices.base import (
    CpuDevice,
    CudaDevice,
    Damage,
    Device,
    DeviceEvent,
    NpuDevice,
)

__all__ = ["Damage", "Device", "DeviceEvent", "device_for"]


def device_for(device: torch.device) -> Device:
    """Return the adapter for a model's device; a type other than CUDA and NPU counts as CPU."""
    if device.type == "cuda":
        return CudaDevice(device)
    return NpuDevice(device) if device.type == "npu" else CpuDevice()
