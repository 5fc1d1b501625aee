"""States, and their transfer from objects to other objects."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from rekindle.agent.memory_limits import create_buffer
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.training.torch.state.capture import CapturedState, finish, prepare


def move(state: CapturedState, named: Mapping[str, Any]) -> None:
    """Move a state as a transfer does: with only the skeleton and the elements."""
    targets = prepare(named, state.skeleton)
    assert list(targets) == list(state.tensors)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(state.tensors[name].clone())
    finish(named)


def sealed(content: bytes) -> SnapshotBuffer:
    """Return a sealed snapshot with this content, like those in the memory of an agent."""
    fd = create_buffer("test", max(1, len(content)))
    try:
        buffer = SnapshotBuffer(fd)
    finally:
        os.close(fd)
    buffer.data[: len(content)] = content
    buffer.commit((1, 1), len(content))
    buffer.seal()
    return buffer
