"""A simulated host, whose file lists its faults; and the reset of a device before a rank starts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rekindle import names
from rekindle.agent.devices import tools as device_tools
from rekindle.errors import JobError


class SimulatedCondition(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a simulated host.

    broken: everything on the host fails. sick_devices: devices that no reset repairs.
    """

    broken: bool = False
    sick_devices: tuple[int, ...] = ()


def condition_file(host: Path) -> Path:
    """Return the file that lists the faults of a host. host: the file of the host."""
    return host.with_name(f"{host.name}{names.CONDITION_SUFFIX}")


def read_condition(host: Path) -> SimulatedCondition:
    """Read the faults of a host. Without a file it has none.

    Raises JobError: the file is not valid.
    """
    path = condition_file(host)
    try:
        return msgspec.json.decode(path.read_bytes(), type=SimulatedCondition)
    except FileNotFoundError:
        return SimulatedCondition()
    except msgspec.DecodeError as error:
        raise JobError(f"{path}: {error}") from error


async def reset_device(device: int, host_file: Path | None) -> str:
    """Reset a device, by its local number; return the reason of a failure, or "".

    host_file: the file of the device's simulated host; None: the device is real.
    """
    if host_file is not None:
        sick = device in read_condition(host_file).sick_devices
        return "the device is still faulty after the reset" if sick else ""
    return await device_tools.reset(device)
