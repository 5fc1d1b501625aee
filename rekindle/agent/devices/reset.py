"""Heals a node's devices before ranks are started on them: the agent's side of a device adapter.

What a rank can do for its own device is in `rekindle.training.devices`; here no process uses it any
more, so it can be reset as a whole.
"""

from __future__ import annotations

from pathlib import Path

from rekindle.agent.devices import tools as device_tools
from rekindle.agent.devices.simulated_host import read_condition


async def heal(device: int, pretended: Path | None) -> str:
    """Reset a device, by its local number; return why it is not healed, or nothing.

    pretended: the file of the pretended host that the device is on.
    """
    if pretended is not None:
        sick = device in read_condition(pretended).sick_devices
        return "it stays broken" if sick else ""
    return await device_tools.reset(device)
