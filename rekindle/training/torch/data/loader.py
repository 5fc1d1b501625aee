"""A DataLoader whose batches a Session yields, and loaders with a state of their own.

The position that counts is what was trained on. So a generation begins with a new iterator, and
what the old one had prefetched is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from rekindle.errors import SessionError
from rekindle.training.torch.data.all_gather import pack, unpack


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


class StatefulPosition:
    """The states of all ranks' loaders behind the last finished step."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._rank = 0
        self._epoch = 0
        self._told: list[bytes] = []  # by rank; none before the first step
        self._initial: bytes | None = None

    def bind(self, rank: int, world_size: int) -> None:
        """Go on from this rank's state.

        Raises SessionError: the states are of another number of ranks.
        """
        self.close()
        self._rank = rank
        if self._told and len(self._told) != world_size:
            raise SessionError(
                f"the loader's states are of {len(self._told)} ranks, and this world has "
                f"{world_size}: a loader's own state cannot be cut up otherwise. Where the world "
                "may change, have the loader read a StepSampler (batch_sampler=sampler) or an "
                "ElasticStream"
            )

    def take(self) -> tuple[Any, bytes]:
        """This rank's next batch, and the state behind it; behind the last one a new epoch."""
        if self._iterator is None:
            self._iterator = self._go_on()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = self._new_epoch()
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise SessionError("the loader has not a single batch in an epoch") from None
        return batch, self._standing()

    def trained(self, told: list[bytes]) -> None:
        """A step is finished."""
        self._told = told

    def close(self) -> None:
        """Let the iterator go, and with it its workers."""
        self._iterator = None

    def told_to_people(self) -> dict[str, Any]:
        """What a manifest shows: the states themselves may hold tensors."""
        return {"world_size": len(self._told), "epoch": self._epoch}

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks."""
        return {"ranks": [unpack(each) for each in self._told]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved states; refused if they are no loader's own."""
        if "ranks" not in state:
            raise SessionError("the state is that of a stream, not of a loader with its own")
        self._told = [pack(each, "loader") for each in state["ranks"]]

    def _go_on(self) -> Iterator[Any]:
        # Both may draw random numbers, and the step has its own.
        with torch.random.fork_rng(devices=()):
            standing = self._told[self._rank] if self._told else self._initial
            if standing is None:
                self._initial = self._standing()
                return begin(self._loader)
            mine = unpack(standing)
            self._epoch = mine["epoch"]
            self._tell_epoch()
            self._loader.load_state_dict(mine["loader"])
            iterator = begin(self._loader)
            if mine["generator"] is not None:
                self._loader.generator.set_state(mine["generator"])
            return iterator

    def _standing(self) -> bytes:
        """All that a later process needs to go on from here.

        Each new iterator draws from the loader's generator, and a loader's own state (torchdata
        0.11) knows nothing of it: the order of the next epoch would be another one.
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
        """Tell those that shuffle by the epoch, as torch's DistributedSampler does."""
        for name in ("sampler", "dataset"):
            tell = getattr(getattr(self._loader, name, None), "set_epoch", None)
            if tell is not None:
                tell(self._epoch)
