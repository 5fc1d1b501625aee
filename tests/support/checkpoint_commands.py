"""Training objects, the checkpoints of their states, and damage to checkpoint files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.training.torch.convert.importing import Imported, write
from rekindle.training.torch.state.capture import capture

STATE = "state-00000.safetensors"


class Done(NamedTuple):
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str


Checkpoints = Callable[..., Done]


class Trained:
    """Training objects after two steps: a model, an optimizer and a scheduler."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.model[2].to(torch.bfloat16)
        self.model[2].bias = self.model[2].bias  # keeps the order of the names in the state
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 4])
        for _ in range(2):
            hidden = self.model[1](self.model[0](torch.randn(4, 6)))
            self.model[2](hidden.bfloat16()).float().square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    @property
    def named(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def keep(self, store: DirectoryStore, step: int, **more: Any) -> Path:
        """Write the state as a job does, and return the folder of the checkpoint."""
        state = capture(self.named | more)
        tree = msgspec.json.decode(state.skeleton)
        written = write(Imported(tree, state.tensors, step, {}), store, job_id="job", step=step)
        return Path(written.location)


def place(store: DirectoryStore, step: int) -> Path:
    return store.root / f"step-{step:010d}-g000000"


def flip(path: Path, at: int) -> None:
    """Change the lowest bit of a byte. For each digit of a checksum, JSON text stays JSON text."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def bits(state: Any) -> Any:
    """Convert a state so that == compares its tensors bit by bit, and the type of each mapping."""
    if torch.is_tensor(state):
        raw = state.detach().reshape(-1).contiguous().view(torch.uint8)
        return (state.dtype, tuple(state.shape), bytes(raw.tolist()))
    if isinstance(state, dict):
        return (type(state).__name__, {key: bits(value) for key, value in state.items()})
    if isinstance(state, list | tuple):
        return type(state)(bits(value) for value in state)
    return state
