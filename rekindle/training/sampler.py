"""Compute the samples of each rank in each step, as a pure function of the step.

The data are one endless stream: the order of epoch 0, then the order of epoch 1, and so on. A step
takes the next `shares * batch_size` samples of the stream. So a batch may contain samples of two
epochs, and no sample is lost or repeated. Rank r in a world of W ranks gets the r-th slice, its
share. If there are more shares than ranks, the rank gets the shares r, r + W, r + 2W and so on.
The position in the stream is the complete state. It has the same meaning in a world of another
size.

The order is a contract between versions: a resumed job must see the same stream as before. So the
order follows from integers alone. A random generator may change between versions of a library.
`tests/unit/training/test_sampler.py` checks that the order stays the same.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import SessionError

_MAX_LENGTH = 2**40
_MAX_SEED = 2**64 - 1
_MAX_SHARE = 2**24  # for batch_size, for the world size and for the shares
_MAX_POSITION = 2**62  # the steps after it still fit in 64 bits

# At least six bits and eight rounds: with fewer, the orders of short data sets are visibly uneven.
_ROUNDS = 8
_MIN_BITS = 6
_GOLDEN = 0x9E3779B97F4A7C15  # the step of splitmix64

# Samples per computation: numpy's overhead per call is small, and a call takes about 1 ms.
_BLOCK = 4096

_Words = NDArray[np.uint64]


class StepSampler:
    """Return the samples of each step; `position` counts the samples that all ranks consumed.

    It also serves as `DataLoader(data, batch_sampler=sampler)`. Such an iterator starts at the
    current position. It then counts the samples on its own, because prefetching workers are ahead
    of the loop.
    """

    def __init__(
        self, length: int, batch_size: int, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        """Create a sampler.

        length: samples in the data set. batch_size: samples per rank and step.
        """
        self._stream = SampleOrder(
            length=integer("length", length, 1, _MAX_LENGTH),
            seed=integer("seed", seed, 0, _MAX_SEED),
            shuffle=bool(shuffle),
        )
        self._batch_size = integer("batch_size", batch_size, 1, _MAX_SHARE)
        self._position = 0
        self._part: _Part | None = None

    def bind(self, rank: int, world_size: int, shares: int | None = None) -> None:
        """Set the rank and the world size. The Session calls it in every generation.

        shares: the number of shares in each step, with `batch_size` samples each. Default: one per
        rank.
        Raises SessionError: the rank is outside the world, or there are fewer shares than ranks.
        """
        world_size = integer("world_size", world_size, 1, _MAX_SHARE)
        rank = integer("rank", rank, 0, world_size - 1)
        shares = world_size if shares is None else shares
        shares = integer("shares", shares, world_size, _MAX_SHARE)
        self._part = _Part(self._stream, self._batch_size, rank, world_size, shares)

    @property
    def position(self) -> int:
        """The number of samples of the stream that all ranks together have consumed."""
        return self._position

    @property
    def batch_size(self) -> int:
        """The samples of a share in each step; a rank of the full world has one share."""
        return self._batch_size

    @property
    def epoch(self) -> int:
        """The epoch that contains the first sample of the next step."""
        return self._position // self._stream.length

    @property
    def shares(self) -> int:
        """The number of shares in a step of all ranks, with `batch_size` samples each."""
        return self._bound().shares

    def indices(self) -> list[int]:
        """Return this rank's samples for the step at `position`, from all its shares."""
        return list(itertools.chain(*self.parts()))

    def parts(self) -> list[list[int]]:
        """Return the samples of each share of this rank."""
        return self._bound().step(self._position)

    def advance(self) -> None:
        """Finish the step: move the position to the next step."""
        self._position += self._bound().span

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's samples for the current step and for each later step, without end.

        A batch is one share. A rank with several shares in each step gets them one after the other.
        After a recovery the iterator continues from the recovered position.
        Raises SessionError: the iterator was ahead of the loop at the recovery. Its batches are
        still in the queues of workers, and training would use them twice.
        """
        part, ahead = self._bound(), False
        batches = part.batches(self._position)
        while True:
            if part is not self._part:
                if ahead:
                    raise SessionError(
                        "the DataLoader prefetched batches for an earlier world; create a new "
                        "iterator of the DataLoader after a recovery"
                    )
                part = self._bound()
                batches = part.batches(self._position)
            position, batch = next(batches)
            ahead = ahead or position != self._position
            yield batch

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position, and the settings that it depends on."""
        return {"position": self._position, **self._stream.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises SessionError: it belongs to another stream."""
        mine = self._stream.identity()
        missing = sorted({"position", *mine} - set(state))
        if missing:
            raise SessionError(f"the sampler's state does not have {', '.join(missing)}")
        differing = [name for name in mine if state[name] != mine[name]]
        if differing:
            details = "; ".join(f"{n} is {state[n]!r} there, {mine[n]!r} here" for n in differing)
            raise SessionError(f"the state belongs to another stream of samples: {details}")
        self._position = integer("position", state["position"], 0, _MAX_POSITION)
        if self._part is not None:  # iterators see the change
            self.bind(self._part.rank, self._part.world_size, self._part.shares)

    def _bound(self) -> _Part:
        if self._part is None:
            raise SessionError(
                "the sampler does not belong to a rank yet; give it to a Session, or call "
                "bind(rank, world_size)"
            )
        return self._part


class _Part:
    """Compute one rank's part of the stream in a world of one size, many steps at a time."""

    def __init__(
        self, stream: SampleOrder, batch_size: int, rank: int, world_size: int, shares: int
    ) -> None:
        self.rank, self.world_size, self.shares = rank, world_size, shares
        self.span = shares * batch_size
        self._stream = stream
        mine = np.arange(rank, shares, world_size, dtype=np.uint64) * np.uint64(batch_size)
        within = mine[:, None] + np.arange(batch_size, dtype=np.uint64)
        steps = np.arange(max(1, _BLOCK // within.size), dtype=np.uint64) * np.uint64(self.span)
        self._offsets: _Words = steps[:, None, None] + within
        self._start = 0
        self._block: _Words = self._offsets[:0]

    def batches(self, position: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the shares of this step and of all later steps, each with its step's position."""
        for begin in itertools.count(position, self.span):
            for share in self.step(begin):
                yield begin, share

    def step(self, position: int) -> list[list[int]]:
        """Return the shares of the step that begins at `position`."""
        row, rest = divmod(position - self._start, self.span)
        if rest or not 0 <= row < len(self._block):
            positions = (self._offsets + np.uint64(position)).ravel()
            self._block = self._stream.samples(positions).reshape(self._offsets.shape)
            self._start, row = position, 0
        samples: list[list[int]] = self._block[row].tolist()
        return samples


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Define the endless order of samples, which is the same for each rank and each world."""

    length: int
    seed: int
    shuffle: bool

    def identity(self) -> dict[str, int | bool]:
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def samples(self, positions: _Words) -> _Words:
        """Return the samples at some positions, which the caller passes in ascending order."""
        epochs, places = np.divmod(positions, np.uint64(self.length))
        if not self.shuffle:
            return places
        if epochs[0] == epochs[-1]:
            epochs = epochs[:1]  # the usual case: one key for all
        keys = _mix(_mix(_words(self.seed + _GOLDEN)) + (epochs + np.uint64(1)) * _word(_GOLDEN))
        return _permute(places, np.broadcast_to(keys, places.shape), self.length)


def _permute(places: _Words, keys: _Words, length: int) -> _Words:
    """Return the image of each place in the permutation of range(length) that its key selects.

    A Feistel network permutes the next power of two. A value outside the range passes through the
    network again until it is inside. The result is a permutation of the range.
    """
    values = _feistel(places, keys, length)
    outside = np.flatnonzero(values >= length)
    while outside.size:
        values[outside] = _feistel(values[outside], keys[outside], length)
        outside = outside[values[outside] >= length]
    return values


def _feistel(values: _Words, keys: _Words, length: int) -> _Words:
    bits = max(_MIN_BITS, (length - 1).bit_length())
    shift = _word((bits + 1) // 2)
    low_mask, high_mask = _word((1 << (bits + 1) // 2) - 1), _word((1 << bits // 2) - 1)
    low, high = values & low_mask, values >> shift
    for round_ in range(0, _ROUNDS, 2):
        high ^= _mix(keys + low + _word(_GOLDEN * round_)) & high_mask
        low ^= _mix(keys + high + _word(_GOLDEN * (round_ + 1))) & low_mask
    return (high << shift) | low


def _mix(words: _Words) -> _Words:
    """Apply the finaliser of splitmix64: each input bit changes about half of the output bits."""
    words = (words ^ (words >> _word(30))) * _word(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> _word(27))) * _word(0x94D049BB133111EB)
    return words ^ (words >> _word(31))


def _word(value: int) -> np.uint64:
    word: np.uint64 = np.uint64(value & 0xFFFFFFFFFFFFFFFF)
    return word


def _words(value: int) -> _Words:
    """Return one word as an array: numpy wraps arrays silently, but warns if a scalar overflows."""
    return np.array([_word(value)])


def integer(name: str, value: int, low: int, high: int) -> int:
    """Return the value. Raises SessionError: it is not an integer in this range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise SessionError(f"{name} must be an integer, not {value!r}") from None
    if not low <= number <= high:
        raise SessionError(f"{name} must be from {low} to {high}, not {number}")
    return number
