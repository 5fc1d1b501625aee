"""A pretended host as its agent sees it: the file that it holds, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rekindle import names
from rekindle.errors import JobError


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a pretended host.

    broken: everything on it fails. sick_devices: those that cannot be healed.
    """

    broken: bool = False
    sick_devices: tuple[int, ...] = ()


def condition_file(host: Path) -> Path:
    """Where it is written what is wrong with the host of this file."""
    return host.with_name(f"{host.name}{names.CONDITION_SUFFIX}")


def read_condition(host: Path) -> Condition:
    """Read what is wrong with a host; nothing, if nobody said so.

    Raises JobError: what is written there is none.
    """
    path = condition_file(host)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Condition)
    except FileNotFoundError:
        return Condition()
    except msgspec.DecodeError as error:
        raise JobError(f"{path}: {error}") from error
