"""The training of both sides: the model and text of examples/charlm, one CPU thread per rank."""

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
ADAM = 3  # a parameter and its two moments
WIDTH = 256
ROWS_PER_STEP = 64


class Table:
    """A large state that takes little time per step: an embedding; a step changes some of its rows.

    The number of the update determines the rows and their change. So all ranks change their copies
    in the same way, without a collective.
    """

    def __init__(self, state_bytes: int) -> None:
        self._rows = state_bytes // (ADAM * 4 * WIDTH)
        weight = torch.ones(self._rows, WIDTH)
        self.embedding = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        self.optimizer = torch.optim.SparseAdam(self.embedding.parameters(), lr=LR)

    def update(self) -> None:
        """Do one step of the optimizer."""
        done = self.optimizer.state[self.embedding.weight].get("step", 0)
        rows = (torch.arange(ROWS_PER_STEP) + done * ROWS_PER_STEP) % self._rows
        self.optimizer.zero_grad(set_to_none=True)
        self.embedding(rows).square().sum().backward()
        self.optimizer.step()


class Task:
    """A model, its optimizer and its samples; the same on every rank.

    size: the model's size, as in examples/charlm. "tiny+100" adds a table, so that the complete
    state has 100 MB.
    beside: the table and its optimizer by name, if there is one.
    """

    def __init__(self, size: str) -> None:
        name, _, megabytes = size.partition("+")
        config = SIZES[name]
        text, _ = load(CHARACTERS)
        self.windows = Windows(text, config.block_size)
        torch.manual_seed(0)
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self._table: Table | None = None
        self.beside: dict[str, nn.Module | torch.optim.Optimizer] = {}
        if megabytes:
            others = ADAM * sum(parameter.nbytes for parameter in self.model.parameters())
            self._table = table = Table(int(megabytes) * 1_000_000 - others)
            self.beside = {"table": table.embedding, "table_optimizer": table.optimizer}

    def forward(self, model: nn.Module, indices: list[int]) -> Tensor:
        """Return the loss on some samples; `model` is the module or its wrapper."""
        inputs, targets = self.windows.batch(indices)
        loss: Tensor = model(inputs, targets)
        return loss

    def update(self, loss: Tensor) -> None:
        """Do the backward pass and one step of the optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.update_table()

    def update_table(self) -> None:
        """Change the table, if there is one."""
        if self._table is not None:
            self._table.update()


class PlainSampler:
    """Shuffle in the fastest way: one permutation per epoch, from which each rank takes slices."""

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        self._length, self._rank, self._world_size = length, rank, world_size
        self._per_epoch = length // (BATCH_SIZE * world_size)
        self._epoch = -1
        self._order: list[int] = []

    def indices(self, step: int) -> list[int]:
        """Return the samples of this rank in a step."""
        epoch, within = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(epoch)
            self._order = torch.randperm(self._length, generator=generator).tolist()
            self._epoch = epoch
        begin = (within * self._world_size + self._rank) * BATCH_SIZE
        return self._order[begin : begin + BATCH_SIZE]
