"""The snapshots and copies in an agent's memory, seen and damaged from outside."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from waiting import wait_until

from rekindle.protocol.snapshot_buffer import CONTROL_BYTES

SNAPSHOTS, COPIES = "rank", "copy"  # of the agent's own ranks, and of others


def wait_sealed(agent: int, kind: str = SNAPSHOTS) -> None:
    """Wait until all snapshots that an agent has are sealed; not while one is being taken."""
    for buffer in buffers(agent, kind):
        wait_until(lambda of=buffer: _is_settled(of), f"seal of {buffer}")


def damage_snapshots(agent: int, step: int | None = None, kind: str = SNAPSHOTS) -> int:
    """Change a byte of the snapshots (of `step`) that an agent has sealed; return how many."""
    wait_sealed(agent, kind)
    count = 0
    for buffer in buffers(agent, kind):
        with buffer.open("r+b") as memory:
            _, found, _, size = struct.unpack("<qqqq", memory.read(32))
            if not size or step not in (None, found):
                continue
            memory.seek(CONTROL_BYTES + size - 8)
            byte = memory.read(1)[0]
            memory.seek(-1, os.SEEK_CUR)
            memory.write(bytes([byte ^ 0x40]))
        count += 1
    return count


def buffers(agent: int, kind: str = SNAPSHOTS) -> list[Path]:
    """List the memory that an agent has for snapshots."""
    links: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # the agent is dead, and its memory gone
        links = [link for link in Path(f"/proc/{agent}/fd").iterdir() if _is(kind, link)]
    # An agent has each open twice.
    return list({link.stat().st_ino: link for link in links}.values())


def _is(kind: str, link: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it was open for a moment only
        return f"memfd:rekindle-job-{kind}" in str(link.readlink())
    return False


def _is_settled(memory: Path) -> bool:
    """Whether a snapshot buffer is sealed, or was never used."""
    with memory.open("rb") as file:
        valid, _, _, size = struct.unpack("<qqqq", file.read(32))
        return bool(file.read(1)[0]) if size else not valid
