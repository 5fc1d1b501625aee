"""The training script with batches from a DataLoader. It logs the samples that it trained on.

Kinds: `map` uses a StepSampler; `kept` also keeps its workers for all epochs. `stream` uses an
ElasticStream whose parts have different sizes; one is empty. `torchdata` uses such a stream with
torchdata's StatefulDataLoader. `stateful` uses that loader with a dataset that has its own
position. The number of a sample includes its epoch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from rekindle.training.torch import ElasticStream, Session, StepSampler
from training_jobs import BATCH
from training_jobs.train import Run

EPOCH = 1000  # added to the number of a sample for each earlier epoch
SIZES = (9, 2, 14, 0, 7, 12, 1, 11, 13, 8, 13, 14)  # samples of the stream's parts
SAMPLES = sum(SIZES)


def numbers_of(part: int) -> range:
    """Return the samples of a part of the stream."""
    before = sum(SIZES[:part])
    return range(before, before + SIZES[part])


class Indexed(Dataset[Any]):
    """Samples by number."""

    def __init__(self, run: Run) -> None:
        self._inputs, self._targets = run.inputs, run.targets

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        place = number % EPOCH
        return number, self._inputs[place], self._targets[place]

    def read(self, part: int, epoch: int, start: int) -> Iterator[Any]:
        """Yield the samples of a part."""
        for number in numbers_of(part)[start:]:
            yield self[epoch * EPOCH + number]


class Shard(IterableDataset[Any]):
    """The samples of this rank, divided among the workers. Each worker knows its position."""

    def __init__(self, indexed: Indexed, rank: int, world_size: int) -> None:
        self._indexed, self._rank, self._world_size = indexed, rank, world_size
        self._epoch = self._next = self._resumed = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        at, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = range(self._rank + at * self._world_size, SAMPLES, self._world_size * workers)
        self._next, self._resumed = self._resumed, 0
        while self._next < len(mine):  # stays at the end afterwards
            self._next += 1
            yield self._indexed[self._epoch * EPOCH + mine[self._next - 1]]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = self._resumed = state["next"]


class LoaderRun(Run):
    """The training of one rank on batches of a loader."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        kind, _, workers = options.variant.partition("-")
        self.sampler = None
        self.loader = self._loader(kind, int(workers))

    def _loader(self, kind: str, workers: int) -> DataLoader[Any]:
        indexed = Indexed(self)
        if kind in ("map", "kept"):
            sampler = StepSampler(SAMPLES, BATCH, seed=3)
            stays = kind == "kept"
            return DataLoader(
                indexed, batch_sampler=sampler, num_workers=workers, persistent_workers=stays
            )
        from torchdata.stateful_dataloader import StatefulDataLoader

        if kind in ("stream", "torchdata"):
            stream = ElasticStream(indexed.read, len(SIZES), seed=3)
            maker = DataLoader if kind == "stream" else StatefulDataLoader
            return maker(stream, batch_size=BATCH, num_workers=workers)
        shard = Shard(indexed, self.rank, int(os.environ.get("WORLD_SIZE", "1")))
        return StatefulDataLoader(shard, batch_size=BATCH, num_workers=workers)

    def session_options(self) -> dict[str, Any]:
        return {"ddp": True, "loader": self.loader}

    def samples_of(self, step) -> list[int]:
        numbers, self._x, self._y = step.batch
        return numbers.tolist()

    def loss_of(self, session: Session, chosen: list[int]) -> torch.Tensor:
        noise = 0.01 * torch.randn(self._x.shape)
        return (session.model(self._x + noise) - self._y).square().mean()
