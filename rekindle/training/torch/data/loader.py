"""Keep the position of a DataLoader whose batches a Session yields, or of a stateful loader.

Only batches that were trained on change the position. So a generation begins with a new iterator,
and drops the batches that the old iterator had prefetched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rekindle.errors import SessionError
from rekindle.training.torch.data.all_gather import pack, unpack


class Position(ABC):
    """The position of a loader, the same on all ranks: each sends bytes about its batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._rank = 0

    def bind(self, rank: int, world_size: int) -> None:
        """Begin a generation: continue after the last batch that was trained on."""
        self.close()
        self._rank = rank

    @abstractmethod
    def take(self) -> tuple[Any, bytes]:
        """Return this rank's next batch, and the bytes about it for all ranks; b"": no bytes."""

    @abstractmethod
    def trained(self, records: list[bytes]) -> None:
        """Finish a step. records: the bytes of each rank about its batch."""

    def close(self) -> None:
        """Drop the iterator, and with it its workers and the batches that they had prefetched."""
        self._iterator = None

    @abstractmethod
    def for_manifest(self) -> dict[str, Any]:
        """Return the position for a checkpoint's manifest, in values that JSON keeps unchanged."""


def begin(loader: Any) -> Iterator[Any]:
    """Return a new iterator without drawing any of the step's random numbers.

    Otherwise a repeated step would draw other numbers than the first time.
    """
    with torch.random.fork_rng(devices=()):
        return iter(loader)


class SamplerPosition(Position):
    """The position of a loader over a StepSampler: the sampler holds it, on every rank."""

    def take(self) -> tuple[Any, bytes]:
        """Return the next share of this rank."""
        if self._iterator is None:
            self._iterator = begin(self._loader)
        return next(self._iterator), b""

    def trained(self, records: list[bytes]) -> None:
        """Do nothing: the sampler advances on its own."""

    def for_manifest(self) -> dict[str, Any]:
        """Return nothing: the sampler's position is complete."""
        return {}


class StatefulPosition(Position):
    """The states of all ranks' loaders after the last finished step."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._epoch = 0
        self._records: list[bytes] = []  # by rank; empty before the first step
        self._initial: bytes | None = None

    def bind(self, rank: int, world_size: int) -> None:
        """Continue from this rank's state.

        Raises SessionError: the states come from another number of ranks.
        """
        super().bind(rank, world_size)
        if self._records and len(self._records) != world_size:
            raise SessionError(
                f"the loader's states belong to {len(self._records)} ranks, but this world has "
                f"{world_size}. Rekindle cannot divide a loader's own state in another way. If "
                "the world may change, use a StepSampler (batch_sampler=sampler) or an "
                "ElasticStream in the loader"
            )

    def take(self) -> tuple[Any, bytes]:
        """Return the next batch and the state after it; start a new epoch after the last batch."""
        if self._iterator is None:
            self._iterator = self._go_on()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = self._new_epoch()
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise SessionError("the loader has no batch in an epoch") from None
        return batch, self._packed_state()

    def trained(self, records: list[bytes]) -> None:
        """Keep the states of the finished step."""
        self._records = records

    def for_manifest(self) -> dict[str, Any]:
        """Return the values for a manifest: the states themselves may hold tensors."""
        return {"world_size": len(self._records), "epoch": self._epoch}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks."""
        return {"ranks": [unpack(each) for each in self._records]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved states. Raises SessionError: they do not belong to such a loader."""
        if "ranks" not in state:
            raise SessionError("the state belongs to a stream, not to a loader with its own state")
        self._records = [pack(each, "loader") for each in state["ranks"]]

    def _go_on(self) -> Iterator[Any]:
        # Both branches may draw random numbers, and the step has its own.
        with torch.random.fork_rng(devices=()):
            packed = self._records[self._rank] if self._records else self._initial
            if packed is None:
                self._initial = self._packed_state()
                return begin(self._loader)
            mine = unpack(packed)
            self._epoch = mine["epoch"]
            self._tell_epoch()
            self._loader.load_state_dict(mine["loader"])
            iterator = begin(self._loader)
            if mine["generator"] is not None:
                self._loader.generator.set_state(mine["generator"])
            return iterator

    def _packed_state(self) -> bytes:
        """Return the state that a later process needs to continue from here.

        Each new iterator draws from the loader's generator. A loader's own state (torchdata 0.11)
        does not include the generator. Without it the order of the next epoch would differ.
        """
        generator = getattr(self._loader, "generator", None)
        state = {
            "epoch": self._epoch,
            "loader": self._loader.state_dict(),
            "generator": generator.get_state() if generator is not None else None,
        }
        return pack(state, "loader")

    def _new_epoch(self) -> Iterator[Any]:
        self._epoch += 1
        self._tell_epoch()
        return begin(self._loader)

    def _tell_epoch(self) -> None:
        """Pass the epoch to objects that shuffle by it, such as torch's DistributedSampler."""
        for name in ("sampler", "dataset"):
            tell = getattr(getattr(self._loader, name, None), "set_epoch", None)
            if tell is not None:
                tell(self._epoch)
