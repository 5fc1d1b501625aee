"""Accelerators after a fault: what is damaged, and making them usable again without a new process.

An adapter each: `cpu`, `cuda`, `npu`.
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
    """The adapter for the device that a model is on; others than CUDA and NPU count as the CPU."""
    if device.type == "cuda":
        return CudaDevice(device)
    return NpuDevice(device) if device.type == "npu" else CpuDevice()
