"""What an agent tells its ranks through their environment."""

from __future__ import annotations

import os
from pathlib import Path

from rekindle import names
from rekindle.runtime.heartbeat import Page


def page() -> Page | None:
    """Take the rank's heartbeat page; None: no agent started this process."""
    fd = os.environ.pop(names.ENV_HEARTBEAT_FD, None)
    if not fd:
        return None
    found = Page(int(fd))
    os.close(int(fd))
    return found


def path(name: str) -> Path | None:
    """Return the path in this variable, if it is set."""
    value = os.environ.get(name)
    return Path(value) if value else None


def steps(name: str) -> int:
    """Return the number of steps in this variable; 0 = never."""
    return int(os.environ.get(name, "0"))
