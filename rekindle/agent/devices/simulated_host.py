"""A simulated host: the file that its agent holds, and the host's faults."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rekindle import names
from rekindle.errors import JobError


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a simulated host.

    broken: everything on the host fails. sick_devices: devices that no reset repairs.
    """

    broken: bool = False
    sick_devices: tuple[int, ...] = ()


def condition_file(host: Path) -> Path:
    """Return the file that lists the faults of a host. host: the file of the host."""
    return host.with_name(f"{host.name}{names.CONDITION_SUFFIX}")


def read_condition(host: Path) -> Condition:
    """Read the faults of a host. Without a file it has none.

    Raises JobError: the file is not valid.
    """
    path = condition_file(host)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Condition)
    except FileNotFoundError:
        return Condition()
    except msgspec.DecodeError as error:
        raise JobError(f"{path}: {error}") from error
