"""Hold a Session's data: sampler, loader, and the parts of a step that keep the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from rekindle.errors import SessionError
from rekindle.training.sampler import StepSampler
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.all_gather import Sharing
from rekindle.training.torch.data.elastic_stream import ElasticStream, StreamPosition
from rekindle.training.torch.data.epoch_position import EpochPosition
from rekindle.training.torch.data.loader import Position, SamplerPosition, StatefulPosition

_WHICH = (
    "a Session can keep the position of a DataLoader with batch_sampler=StepSampler(...), of a "
    "DataLoader with an ElasticStream as its dataset, and of a loader with its own state "
    "(state_dict() and load_state_dict()), such as torchdata's StatefulDataLoader"
)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One share of a step's global batch, which this rank computes.

    indices: its samples. weight: the factor for their mean loss before `backward`. With the factor
    the gradient, averaged over the ranks, is the mean over all shares. In the full world it is 1.0.
    batch: the batch of the Session's loader; None: the Session has no loader.
    """

    indices: list[int]
    weight: float
    batch: Any = field(default=None, compare=False)


class Parts:
    """One rank's parts of one step; `left`: the number of parts that remain."""

    def __init__(
        self, model: torch.nn.Module, sampler: StepSampler, take: Callable[[], Any] | None = None
    ) -> None:
        """Compute the parts. take: returns the loader's next batch; None: there is no loader."""
        self._model = model
        self._take = take
        self._samples = sampler.parts()
        self._shares = sampler.shares
        self.left = len(self._samples)

    def each(self, *, seed: int, rank: int, world_size: int, step: int) -> Iterator[MicroBatch]:
        """Yield the parts; the caller does forward and backward of one before it takes the next.

        Each part has the random streams of the rank that has this share in the full world.
        """
        for number, indices in enumerate(self._samples):
            if number > 0:  # the first share's streams are the step's own
                rng.begin_step(seed, rank + number * world_size, step)
            self.left = len(self._samples) - number - 1
            _set_sync(self._model, self.left == 0)
            batch = self._take() if self._take is not None else None
            yield MicroBatch(indices, world_size / self._shares, batch)

    def close(self) -> None:
        """Leave the step, maybe before its end: the next backward pass all-reduces again."""
        _set_sync(self._model, True)


def _set_sync(model: torch.nn.Module, whether: bool) -> None:
    """Set whether the next forward pass leads to an all-reduce of gradients; see no_sync()."""
    if isinstance(model, DistributedDataParallel):  # otherwise the script all-reduces later
        model.require_backward_grad_sync = whether


class Data:
    """Returns this rank's batch of each step.

    sampler: the given sampler, or the loader's. named: the objects with a state, by name.
    epochs: the place in a loop over epochs, which has loaders of its own.
    """

    def __init__(
        self,
        sampler: StepSampler | None,
        loader: Any,
        full_world: int,
        waits: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        *,
        in_parts: bool,
    ) -> None:
        """Check sampler and loader.

        in_parts: a step may take several batches on a rank, to keep the global batch. waits: a
        context around each wait for the loader.

        Raises SessionError: a Session cannot keep the position of such a loader.
        """
        batches_of = getattr(loader, "batch_sampler", None)
        if sampler is None and isinstance(batches_of, StepSampler):
            sampler = batches_of
        self.sampler = sampler
        self._position = _position_of(loader, sampler, full_world)
        if in_parts and isinstance(self._position, StreamPosition | StatefulPosition):
            raise SessionError(
                "keep_global_batch=True: only a loader with batch_sampler=StepSampler(...) can "
                "give a rank the batches of several ranks"
            )
        self.epochs = EpochPosition()
        self.named: dict[str, Any] = {"position": self.epochs}
        if sampler is not None:
            self.named["sampler"] = sampler
        if isinstance(self._position, StreamPosition | StatefulPosition):
            self.named["loader"] = self._position
        self._waits = waits
        self._records: list[bytes] | None = None
        self._batch: Any = None  # the last batch

    @property
    def has_loader(self) -> bool:
        """Whether there is a loader with batches."""
        return self._position is not None

    @property
    def was_taken(self) -> bool:
        """Whether this step has taken its batch; True without a loader."""
        return self._position is None or self._records is not None

    def bind(self, rank: int, world_size: int, shares: int | None) -> None:
        """Begin a generation: continue after the last finished step.

        shares: the shares of a StepSampler.
        """
        self._records = self._batch = None
        if self.sampler is not None:
            self.sampler.bind(rank, world_size, shares)
        if self._position is not None:
            self._sharing = Sharing()
            self._position.bind(rank, world_size)

    def batch(self) -> Any:
        """Return this rank's batch of the step, the same one in each call; raises like take()."""
        return self._batch if self._records is not None else self.take()

    def take(self) -> Any:
        """Return this rank's next batch; a step may have several. All ranks must take one.

        Raises SessionError: there is no loader.
        """
        if self._position is None:
            raise SessionError("step.batch: give Session a loader, Session(loader=...)")
        try:
            with self._waits():
                self._batch, words = self._position.take()
        except Exception:
            self._position.close()  # a script that tries again gets the same batch
            raise
        self._records = self._sharing.all_gather(words) if words else []
        return self._batch

    def advance(self) -> None:
        """Finish the step."""
        if self.sampler is not None:
            self.sampler.advance()
        if self._position is not None:
            self._position.trained(self._records or [])
        self._records = self._batch = None

    def position(self) -> dict[str, Any]:
        """Return the start of the next step's data, as a checkpoint's manifest shows it."""
        if self.sampler is not None:
            return self.sampler.state_dict()
        if self._position is not None:
            return self._position.for_manifest()
        return self.epochs.for_manifest()

    def close(self) -> None:
        """End the loader's workers."""
        if self._position is not None:
            self._position.close()


def _position_of(loader: Any, sampler: StepSampler | None, full_world: int) -> Position | None:
    if loader is None:
        return None
    if isinstance(loader, DataLoader):
        if not getattr(loader, "in_order", True):  # torch 2.6 and later have it
            raise SessionError(
                "with in_order=False the order of batches depends on the speed of the workers, "
                "so a step cannot be repeated; leave it out"
            )
        if isinstance(loader.batch_sampler, StepSampler):
            if loader.batch_sampler is not sampler:
                raise SessionError(
                    "the loader's batch_sampler and the sampler of Session are different; give "
                    "the same object"
                )
            return SamplerPosition(loader)
        if isinstance(loader.sampler, StepSampler):
            raise SessionError(
                "a StepSampler returns complete batches; write DataLoader(..., "
                "batch_sampler=sampler)"
            )
    if sampler is not None:
        raise SessionError(
            "the loader does not use the sampler; leave the sampler out, or give it to the "
            "loader, DataLoader(..., batch_sampler=sampler)"
        )
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, ElasticStream):
        return StreamPosition(loader, loader.dataset, full_world=full_world)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulPosition(loader)
    raise SessionError(f"loader is a {type(loader).__name__}, but {_WHICH}")
