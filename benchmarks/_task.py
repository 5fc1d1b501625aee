"""What both sides train: the model and the text of examples/charlm, on one CPU thread per rank."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "charlm"))

from corpus import Windows, load
from model import GPT, SIZES

CHARACTERS = 200_000
BATCH_SIZE = 8
LR = 3e-3


class Task:
    """A model, its optimizer and its samples; the same on every rank."""

    def __init__(self, size: str) -> None:
        config = SIZES[size]
        text, _ = load(CHARACTERS)
        self.windows = Windows(text, config.block_size)
        torch.manual_seed(0)
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)

    def forward(self, model: nn.Module, indices: list[int]) -> Tensor:
        """The loss on some samples; `model` is the module or what wraps it."""
        inputs, targets = self.windows.batch(indices)
        loss: Tensor = model(inputs, targets)
        return loss

    def update(self, loss: Tensor) -> None:
        """Backward pass and one step of the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


class PlainSampler:
    """The cheapest way to shuffle: one permutation per epoch, and each rank takes its slices."""

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        self._length, self._rank, self._world_size = length, rank, world_size
        self._per_epoch = length // (BATCH_SIZE * world_size)
        self._epoch = -1
        self._order: list[int] = []

    def indices(self, step: int) -> list[int]:
        """The samples of this rank in a step."""
        epoch, within = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(epoch)
            self._order = torch.randperm(self._length, generator=generator).tolist()
            self._epoch = epoch
        begin = (within * self._world_size + self._rank) * BATCH_SIZE
        return self._order[begin : begin + BATCH_SIZE]
