"""The values that an agent passes to its ranks through environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from rekindle import names
from rekindle.protocol.heartbeat_page import HeartbeatPage


def page() -> HeartbeatPage:
    """Return the rank's heartbeat page. Without an agent no process reads it."""
    fd = os.environ.pop(names.ENV_HEARTBEAT_FD, None)
    if not fd:
        return HeartbeatPage()
    found = HeartbeatPage(int(fd))
    os.close(int(fd))
    return found


def path(name: str) -> Path | None:
    """Return the path in this variable, if it is set."""
    value = os.environ.get(name)
    return Path(value) if value else None


def number(name: str, default: int = 0) -> int:
    """Return the number in this variable, or the default if it is not set."""
    return int(os.environ.get(name, default))


def slot_of_world(rank: int | None = None) -> tuple[int, int]:
    """Return the rank's slot, and the size of the full world.

    rank: the slot of a rank without an agent; None: torchrun's RANK.
    """
    slot = number(names.ENV_SLOT, number("RANK") if rank is None else rank)
    return slot, number(names.ENV_FULL_WORLD, number("WORLD_SIZE", 1))


def move(rank: int, world_size: int) -> None:
    """Update torchrun's variables after a change of the world, because libraries read them."""
    if (rank, world_size) == (number("RANK"), number("WORLD_SIZE", 1)):
        return
    per_node = number("LOCAL_WORLD_SIZE", 1)
    now = {
        "RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": rank // per_node,
        "WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": world_size // per_node,
    }
    os.environ.update({name: str(value) for name, value in now.items()})
