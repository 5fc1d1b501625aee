"""Inspect and damage the snapshots and copies in the memory of an agent, from another process."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from waiting import wait_until

from rekindle.protocol.snapshot_buffer import CONTROL_BYTES

SNAPSHOTS, COPIES = "rank", "copy"  # snapshots of own ranks, copies for other ranks


def wait_sealed(agent: int, kind: str = SNAPSHOTS) -> None:
    """Wait until all snapshots of an agent are sealed.

    No rank may take a snapshot at the same time.
    """
    for buffer in buffers(agent, kind):
        wait_until(lambda of=buffer: _is_settled(of), f"seal of {buffer}")


def damage_snapshots(agent: int, step: int | None = None, kind: str = SNAPSHOTS) -> int:
    """Change a byte of each sealed snapshot (of `step`) of an agent, and return their number."""
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
    """Return the paths of the memory files of an agent's snapshots."""
    links: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # the agent has ended, and its memory is gone
        links = [link for link in Path(f"/proc/{agent}/fd").iterdir() if _is(kind, link)]
    # An agent has two descriptors of each file.
    return list({link.stat().st_ino: link for link in links}.values())


def _is(kind: str, link: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # the descriptor was closed in the meantime
        return f"memfd:rekindle-job-{kind}" in str(link.readlink())
    return False


def _is_settled(memory: Path) -> bool:
    """Return whether a snapshot buffer is sealed or was never used."""
    with memory.open("rb") as file:
        valid, _, _, size = struct.unpack("<qqqq", file.read(32))
        return bool(file.read(1)[0]) if size else not valid
