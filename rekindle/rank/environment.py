"""The values that an agent passes to its ranks through environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from rekindle import names
from rekindle.errors import SessionError
from rekindle.protocol.heartbeat_page import HeartbeatPage

# The variables of torchrun that form a process group.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_taken_in = 0  # the process that took over the connection to its agent


def take_channel() -> int | None:
    """Return the descriptor of the connection to the agent, only once; None: there is none."""
    global _taken_in
    fd = os.environ.pop(names.ENV_CHANNEL_FD, None)
    if not fd:
        return None
    _taken_in = os.getpid()
    return int(fd)


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


def is_first_start() -> bool:
    """Return whether this process is the first of its rank in the job; without an agent it is."""
    return number(names.ENV_FIRST_START, 1) == 1


def is_replacement() -> bool:
    """Return whether this process takes the place of an earlier one of its rank.

    Such a process does not repeat checks that the earlier one has passed: the others wait for it.
    The earlier one was on this node, or on a node whose place this one has taken.
    """
    return number(names.ENV_START_COUNT, 1) > 1 or number(names.ENV_JOINS) == 1


def check_is_rank() -> None:
    """Check that a process without a connection to an agent is no rank, and no child of one.

    Raises SessionError: it has the environment of a rank, and is another process. Its records and
    its process group would be those of the rank. Or it is the rank, and has a Session already.
    """
    if names.ENV_METRICS_FILE in os.environ and _taken_in == os.getpid():
        raise SessionError(
            "this script has a Session already, and a second one would recover nothing: a process "
            "that replaces a rank runs the script from its beginning. Give one Session the objects "
            "of both phases, and choose the phase by step.number; or run a job for each phase"
        )
    if names.ENV_METRICS_FILE in os.environ and _taken_in != os.getpid():
        raise SessionError(
            f"this process is a child of rank {os.environ.get('RANK')} of job "
            f"{os.environ.get(names.ENV_JOB_ID)}, and has the environment of the rank: a Session "
            "in it would write into the rank's records, and wait for the other ranks. Start it "
            "without the variables of a rank: env={name: value for name, value in "
            f"os.environ.items() if name not in {RANK_VARIABLES} and not "
            "name.startswith('REKINDLE_')}"
        )


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
