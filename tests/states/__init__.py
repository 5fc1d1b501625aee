"""States that go from some objects to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rekindle.training.torch_state import State, finish, prepare


def move(state: State, named: Mapping[str, Any]) -> None:
    """As a transfer does: only the skeleton and the elements go over."""
    targets = prepare(named, state.skeleton)
    assert list(targets) == list(state.tensors)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(state.tensors[name].clone())
    finish(named)
