"""Heals a node's devices before ranks are started on them: the agent's side of a device adapter.

What a rank can do for its own device is in `rekindle.training.devices`; here no process uses it any
more, so it can be reset as a whole.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path

from rekindle.runtime.pretended_host import read_condition

# MindCluster's device plugin waits as long for a reset (WaitDeviceResetTime).
RESET_TIMEOUT_S = 150.0

NPU_MANAGER = Path("/dev/davinci_manager")
GPU_MANAGER = Path("/dev/nvidiactl")
_MAPPED = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+)\s", re.MULTILINE)  # card, chip, logical number


async def heal(device: int, pretended: Path | None) -> str:
    """Reset a device, by its local number; return why it is not healed, or nothing.

    pretended: the file of the pretended host that the device is on.
    """
    if pretended is not None:
        sick = device in read_condition(pretended).sick_devices
        return "it stays broken" if sick else ""
    if NPU_MANAGER.exists():
        return await _reset_npu(_visible(device, os.environ, "ASCEND_RT_VISIBLE_DEVICES"))
    if GPU_MANAGER.exists():
        number = _visible(device, os.environ, "CUDA_VISIBLE_DEVICES")
        return (await _run("nvidia-smi", "--gpu-reset", "-i", number))[1]
    return ""  # a CPU has nothing to reset


def _visible(device: int, environment: Mapping[str, str], name: str) -> str:
    """Return what the machine calls the device that ranks know by its local number."""
    listed = [each.strip() for each in environment.get(name, "").split(",") if each.strip()]
    return listed[device] if device < len(listed) else str(device)


async def _reset_npu(logical: str) -> str:
    """Reset an NPU, which its tool knows by card and chip."""
    told, error = await _run("npu-smi", "info", "-m")
    if error:
        return error
    for card, chip, number in _MAPPED.findall(told):
        if number == logical:
            return (await _run("npu-smi", "set", "-t", "reset", "-i", card, "-c", chip))[1]
    return f"npu-smi knows no chip with the logical number {logical}"


async def _run(*command: str) -> tuple[str, str]:
    """Run a tool; return what it said, and why it failed, if it did."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return "", f"{command[0]} cannot be run: {error.strerror}"
    try:
        output, _ = await asyncio.wait_for(process.communicate(), RESET_TIMEOUT_S)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        return "", f"{' '.join(command)} took more than {RESET_TIMEOUT_S:g} s"
    text = output.decode(errors="replace").strip()
    if process.returncode:
        return text, f"{' '.join(command)} ended with status {process.returncode}: {text[-300:]}"
    return text, ""
