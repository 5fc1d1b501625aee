"""A step in parts, which keep the global batch as it is when the world is smaller.

In the full world each rank does one share of the global batch. In a smaller one a rank does
several, one after the other, and adds up their gradients; only the last part all-reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rekindle.training.data.sampler import StepSampler
from rekindle.training.torch.data import random_streams as rng


@dataclass(frozen=True, slots=True)
class Part:
    """One share of a step's global batch, done by this rank.

    indices: its samples. weight: what their mean loss is multiplied by before `backward`: the
    gradient, averaged over the ranks, is then the mean over all shares. 1.0 in the full world.
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

    def each(self, *, seed: int, rank: int, world_size: int, step: int) -> Iterator[Part]:
        """Yield the parts; the caller does forward and backward of one before it takes the next.

        Each has the random streams of the rank whose share it is in the full world.
        """
        for number, indices in enumerate(self._samples):
            if number > 0:  # the first share's streams are the step's own
                rng.begin_step(seed, rank + number * world_size, step)
            self.left = len(self._samples) - number - 1
            _set_sync(self._model, self.left == 0)
            batch = self._take() if self._take is not None else None
            yield Part(indices, world_size / self._shares, batch)

    def close(self) -> None:
        """The step is left, maybe in the middle: whatever comes next is all-reduced again."""
        _set_sync(self._model, True)


def _set_sync(model: torch.nn.Module, whether: bool) -> None:
    """Whether the next forward pass is one whose gradients are all-reduced; see DDP's no_sync()."""
    if isinstance(model, DistributedDataParallel):  # else the script all-reduces, behind its loop
        model.require_backward_grad_sync = whether
