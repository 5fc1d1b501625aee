"""Accelerators after a fault: what is damaged, and making them usable again without a new process.

An adapter each: `cpu`, `cuda`, `npu`.
"""

from __future__ import annotations

import torch

from rekindle.training.devices.base import CpuDevice, Damage, Device, DeviceEvent

__all__ = ["Damage", "Device", "DeviceEvent", "device_for"]


def device_for(device: torch.device) -> Device:
    """The adapter for the device that a model is on; others than CUDA and NPU count as the CPU."""
    if device.type == "cuda":
        from rekindle.training.devices.base import CudaDevice

        return CudaDevice(device)
    if device.type == "npu":
        from rekindle.training.devices.base import NpuDevice

        return NpuDevice(device)
    return CpuDevice()
