"""A DataLoader whose batches a Session hands out: what its position must do, and the simplest one.

The position that counts is what was trained on. So a generation begins with a new iterator, and
what the old one had prefetched is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Position(Protocol):
    """Where a loader stands, alike on all ranks: each tells the others of its batches."""

    def bind(self, rank: int, world_size: int) -> None:
        """A generation begins: go on behind what was trained on."""

    def take(self) -> tuple[Any, bytes]:
        """This rank's next batch, and what to tell all ranks of it; nothing: b""."""

    def trained(self, told: list[bytes]) -> None:
        """A step is finished: what each rank had told of its batch."""

    def close(self) -> None:
        """Let the iterator go."""

    def told_to_people(self) -> dict[str, Any]:
        """The position as a checkpoint's manifest shows it: values that JSON keeps unchanged."""


def begin(loader: Any) -> Iterator[Any]:
    """A new iterator, which draws none of the step's random numbers.

    Else a step that is done again would draw other ones than the first time.
    """
    with torch.random.fork_rng(devices=()):
        return iter(loader)


class SamplerPosition:
    """That of a loader over a StepSampler: the sampler knows it all, on every rank."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def bind(self, rank: int, world_size: int) -> None:
        """The sampler was bound before."""
        self.close()

    def take(self) -> tuple[Any, bytes]:
        """The next share of this rank."""
        if self._iterator is None:
            self._iterator = begin(self._loader)
        return next(self._iterator), b""

    def trained(self, told: list[bytes]) -> None:
        """The sampler advances by itself."""

    def close(self) -> None:
        """Let the iterator go, and with it its workers."""
        self._iterator = None

    def told_to_people(self) -> dict[str, Any]:
        """The sampler's says it all."""
        return {}
