"""A Session's data: sampler, loader, and the parts of a step that keep the global batch."""

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
from rekindle.training.data.sampler import StepSampler
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.all_gather import Sharing
from rekindle.training.torch.data.elastic_stream import ElasticStream, StreamPosition
from rekindle.training.torch.data.loader import Position, SamplerPosition, StatefulPosition


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One share of a step's global batch, done by this rank.

    indices: its samples. weight: factor for their mean loss before `backward`. With it the
    gradient, averaged over the ranks, is the mean over all shares. 1.0 in the full world.
    batch: of the Session's loader, if it has one.
    """

    indices: list[int]
    weight: float
    batch: Any = field(default=None, compare=False)


class Parts:
    """One rank's parts of one step; `left`: those that were not handed out yet."""

    def __init__(
        self, model: torch.nn.Module, sampler: StepSampler, take: Callable[[], Any] | None = None
    ) -> None:
        """take: gives the loader's next batch; None: there is no loader."""
        self._model = model
        self._take = take
        self._samples = sampler.parts()
        self._shares = sampler.shares
        self.left = len(self._samples)

    def each(self, *, seed: int, rank: int, world_size: int, step: int) -> Iterator[MicroBatch]:
        """Yield the parts; the caller does forward and backward of one before it takes the next.

        Each has the random streams of the rank whose share it is in the full world.
        """
        for number, indices in enumerate(self._samples):
            if number > 0:  # the first share's streams are the step's own
                rng.begin_step(seed, rank + number * world_size, step)
            self.left = len(self._samples) - number - 1
            _set_sync(self._model, self.left == 0)
            batch = self._take() if self._take is not None else None
            yield MicroBatch(indices, world_size / self._shares, batch)

    def close(self) -> None:
        """The step is left, maybe in the middle: whatever comes next is all-reduced again."""
        _set_sync(self._model, True)


def _set_sync(model: torch.nn.Module, whether: bool) -> None:
    """Whether the next forward pass is one whose gradients are all-reduced; see DDP's no_sync()."""
    if isinstance(model, DistributedDataParallel):  # else the script all-reduces, behind its loop
        model.require_backward_grad_sync = whether


_WHICH = (
    "a Session can keep the position of a DataLoader with batch_sampler=StepSampler(...), of one "
    "whose dataset is an ElasticStream, and of a loader with a state of its own (state_dict() and "
    "load_state_dict()), such as torchdata's StatefulDataLoader"
)


class Data:
    """Hands out this rank's batch of each step.

    sampler: the one given, or else that of the loader. named: what has a state, by its name.
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
        """in_parts: a step may take several batches on a rank, to keep the global one.

        waits: around each time that the loader is waited for.

        Raises SessionError: the position of such a loader cannot be kept.
        """
        batches_of = getattr(loader, "batch_sampler", None)
        if sampler is None and isinstance(batches_of, StepSampler):
            sampler = batches_of
        self.sampler = sampler
        self._position = _position_of(loader, sampler, full_world)
        if in_parts and isinstance(self._position, StreamPosition | StatefulPosition):
            raise SessionError(
                "keep_global_batch=True: only a loader with batch_sampler=StepSampler(...) can "
                "give a rank the batches of several ones"
            )
        self.named: dict[str, Any] = {}
        if sampler is not None:
            self.named["sampler"] = sampler
        if isinstance(self._position, StreamPosition | StatefulPosition):
            self.named["loader"] = self._position
        self._sharing = Sharing()
        self._waits = waits
        self._told: list[bytes] | None = None
        self._batch: Any = None  # the last one

    @property
    def has_loader(self) -> bool:
        """Whether there are batches."""
        return self._position is not None

    @property
    def was_taken(self) -> bool:
        """Whether this step has had its batch, if there are any."""
        return self._position is None or self._told is not None

    def bind(self, rank: int, world_size: int, shares: int | None) -> None:
        """A generation begins: go on behind the last finished step.

        shares: of a StepSampler.
        """
        self._sharing = Sharing()
        self._told = self._batch = None
        if self.sampler is not None:
            self.sampler.bind(rank, world_size, shares)
        if self._position is not None:
            self._position.bind(rank, world_size)

    def batch(self) -> Any:
        """This rank's batch of the step, however often it is asked for; raises as take() does."""
        return self._batch if self._told is not None else self.take()

    def take(self) -> Any:
        """This rank's next batch, of a step that may have several; all ranks must take one.

        Raises SessionError: there is no loader.
        """
        if self._position is None:
            raise SessionError("step.batch: give Session a loader, Session(loader=...)")
        try:
            with self._waits():
                self._batch, words = self._position.take()
        except Exception:
            self._position.close()  # a script that tries once more gets this very batch
            raise
        self._told = self._sharing.tell(words) if words else []
        return self._batch

    def advance(self) -> None:
        """The step is finished."""
        if self.sampler is not None:
            self.sampler.advance()
        if self._position is not None:
            self._position.trained(self._told or [])
        self._told = self._batch = None

    def position(self) -> dict[str, Any]:
        """Where the next step's data begin, as a checkpoint's manifest shows it."""
        if self.sampler is not None:
            return self.sampler.state_dict()
        return self._position.told_to_people() if self._position is not None else {}

    def close(self) -> None:
        """Let the loader's workers end."""
        if self._position is not None:
            self._position.close()


def _position_of(loader: Any, sampler: StepSampler | None, full_world: int) -> Position | None:
    if loader is None:
        return None
    if isinstance(loader, DataLoader):
        if not getattr(loader, "in_order", True):  # of torch 2.6 and later
            raise SessionError(
                "in_order=False: which batch comes in which step would depend on the workers' "
                "speed, and no step could be done again; leave it out"
            )
        if isinstance(loader.batch_sampler, StepSampler):
            if loader.batch_sampler is not sampler:
                raise SessionError("the loader's batch_sampler is another one than the sampler")
            return SamplerPosition(loader)
        if isinstance(loader.sampler, StepSampler):
            raise SessionError(
                "a StepSampler makes whole batches: DataLoader(..., batch_sampler=sampler)"
            )
    if sampler is not None:
        raise SessionError(
            "sampler and loader: the loader does not read the sampler; leave the sampler out, or "
            "make it the loader's, DataLoader(..., batch_sampler=sampler)"
        )
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, ElasticStream):
        return StreamPosition(loader, loader.dataset, full_world=full_world)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulPosition(loader)
    raise SessionError(f"loader is a {type(loader).__name__}, and {_WHICH}")
