"""Divide streams without an index among the ranks of any world: each sample once per epoch.

A reader is a worker of a rank's DataLoader, or the rank itself. Each reader has one part open at a
time; `PartAssignment` gives the order of its parts. Each sample has a mark with its reader's
position after it. The marks of the samples that were trained on decide, because workers are ahead
of the training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from rekindle.errors import SessionError
from rekindle.training.sampler import SampleOrder, integer
from rekindle.training.torch.data.loader import Position, begin

_MAX_PARTS = 2**24
_EMPTY = 1000  # the limit of consecutive parts without samples, in addition to one of each


class Item(NamedTuple):
    """A part in one epoch, by its number in the queue; `start`: its samples that are trained."""

    number: int
    start: int


class Mark(NamedTuple):
    """A reader's progress: `turn`, the index of its item, and `start`, the samples of it so far."""

    turn: int
    start: int


@dataclass(frozen=True, slots=True)
class PartAssignment:
    """An assignment of items to readers.

    left: unfinished items that some reader has received, in ascending order.
    fresh: the first number that no reader has received.
    """

    left: tuple[Item, ...]
    fresh: int
    readers: int

    def item(self, reader: int, turn: int) -> Item:
        """Return the n-th item of a reader, from 0."""
        place = reader + turn * self.readers
        if place < len(self.left):
            return self.left[place]
        return Item(self.fresh + place - len(self.left), 0)

    def beginning(self) -> list[Mark]:
        """Return the first mark of each reader."""
        return [Mark(0, self.item(reader, 0).start) for reader in range(self.readers)]

    def again(self, marks: Sequence[Mark], readers: int) -> PartAssignment:
        """Assign the items that remain after these marks to `readers` readers."""
        begun = max(reader + mark.turn * self.readers for reader, mark in enumerate(marks)) + 1
        assigned = max(begun, len(self.left))
        done = min(mark.turn for mark in marks) * self.readers
        left = []
        for place in range(done, assigned):
            turn, reader = divmod(place, self.readers)
            mark, item = marks[reader], self.item(reader, turn)
            if turn == mark.turn:
                left.append(Item(item.number, mark.start))
            elif turn > mark.turn:
                left.append(item)
        return PartAssignment(tuple(sorted(left)), self.fresh + assigned - len(self.left), readers)

    def ahead(self, marks: Sequence[Mark]) -> int:
        """Return how many items the foremost reader is ahead of the first unstarted item."""
        places = range(self.readers)
        foremost = max(self.item(reader, marks[reader].turn).number for reader in places)
        waiting = min(self.item(reader, marks[reader].turn + 1).number for reader in places)
        return foremost - waiting


class Marked(NamedTuple):
    """A sample or batch, and its reader's mark after it."""

    mark: Mark
    data: Any


class ElasticStream(IterableDataset[Any]):
    """The dataset of a DataLoader: a stream in a fixed number of parts (files, shards, key ranges).

    Each worker of the DataLoaders on all ranks gets some of the parts. The stream assigns the rest
    of the parts again when the world changes. So every sample occurs exactly once per epoch in a
    world of any size. The epochs follow each other without a pause: a batch may have samples of two
    epochs.

    The Session that gets the DataLoader keeps the position. Without a Session the stream cannot
    iterate.
    """

    def __init__(
        self,
        read: Callable[[int, int, int], Iterable[Any]],
        parts: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Make a stream without reading a part.

        read: read(part, epoch, start) yields the samples of a part from its sample `start`. Each
            call with the same part and epoch yields the same samples in the same order.
        parts: at least one for each worker of the full world.
        shuffle: whether their order is random, and different in each epoch.
        """
        self.parts = integer("parts", parts, 1, _MAX_PARTS)
        self._order = SampleOrder(
            length=self.parts,
            seed=integer("seed", seed, 0, 2**64 - 1),
            shuffle=bool(shuffle),
        )
        if not callable(read):
            raise SessionError(f"read is {read!r}; give a function read(part, epoch, start)")
        self._read = read
        self.reading: Reading | None = None

    def identity(self) -> dict[str, int | bool]:
        """Return the settings on which the meaning of a position depends."""
        return {"parts": self.parts, "seed": self._order.seed, "shuffle": self._order.shuffle}

    def __iter__(self) -> Iterator[Marked]:
        """Yield this reader's samples, each with its mark, without end."""
        if self.reading is None:
            raise SessionError(
                "the stream does not belong to a rank yet; give its DataLoader to a Session, "
                "Session(loader=...), and use step.batch"
            )
        worker = get_worker_info()
        at = worker.id if worker is not None else 0
        empty = 0
        for turn, item in self.reading.items(at):
            if empty > self.parts + _EMPTY:
                raise SessionError(
                    f"read() returned no sample for {empty} consecutive parts, the last one {item}"
                )
            empty += 1
            for sample, data in enumerate(self._samples(item), item.start + 1):
                empty = 0
                yield Marked(Mark(turn, sample), data)

    def _samples(self, item: Item) -> Iterable[Any]:
        epoch = item.number // self.parts
        (part,) = self._order.samples(np.array([item.number], dtype=np.uint64)).tolist()
        return self._read(part, epoch, item.start)


@dataclass(frozen=True, slots=True)
class Reading:
    """The position from which one rank's readers continue.

    marks: the marks of its readers, in the assignment. turned: the reader that makes the next
    batch. A new iterator of a DataLoader starts with its worker 0, so worker 0 takes that reader's
    items.
    """

    assignment: PartAssignment
    marks: tuple[Mark, ...]
    first: int  # number of the rank's first reader among all
    turned: int

    def items(self, worker: int) -> Iterator[tuple[int, Item]]:
        """Yield the items of a worker, each with its turn."""
        mine = (worker + self.turned) % len(self.marks)
        mark = self.marks[mine]
        for turn in itertools.count(mark.turn):
            item = self.assignment.item(self.first + mine, turn)
            yield turn, Item(item.number, mark.start) if turn == mark.turn else item


class Collate:
    """Call the DataLoader's own collate_fn without the marks."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self._own = own

    def __call__(self, samples: Marked | list[Marked]) -> Marked:
        """Make a batch; a DataLoader without batches passes one sample."""
        if isinstance(samples, Marked):
            return Marked(samples.mark, self._own(samples.data))
        return Marked(samples[-1].mark, self._own([each.data for each in samples]))


@dataclass(frozen=True, slots=True)
class StreamState:
    """An assignment, the marks of its readers, and the batches that each rank took from it."""

    assignment: PartAssignment
    marks: tuple[Mark, ...]
    batches: int = 0

    def assigned_again(self, readers: int) -> StreamState:
        """Return the state with the remaining items assigned to `readers` readers."""
        assignment = self.assignment.again(self.marks, readers)
        return StreamState(assignment, tuple(assignment.beginning()))


class StreamPosition(Position):
    """The position of all readers of a stream, equal on all ranks; this rank's DataLoader follows.

    The kept position changes only with a finished step. A generation may end before all ranks know
    about a new assignment. With an earlier change, the ranks that know would assign parts twice.
    """

    def __init__(self, loader: DataLoader[Any], stream: ElasticStream, *, full_world: int) -> None:
        super().__init__(loader)
        self._workers = max(1, loader.num_workers)
        if loader.num_workers and loader.persistent_workers:
            raise SessionError(
                "persistent_workers=True would lose samples, because after a recovery the "
                "workers would continue after the samples that they have prefetched; leave it "
                "out"
            )
        if stream.parts < full_world * self._workers:
            raise SessionError(
                f"the stream has {stream.parts} parts for {full_world} ranks with "
                f"{self._workers} readers each, but every reader needs one; divide the stream "
                "into more parts"
            )
        if not isinstance(loader.collate_fn, Collate):
            loader.collate_fn = Collate(loader.collate_fn)
        self._stream = stream
        self._kept = self._now = _fresh(full_world * self._workers)

    def bind(self, rank: int, world_size: int) -> None:
        """Set the rank's place in a world. A world of the same size keeps the assignment."""
        super().bind(rank, world_size)
        readers = world_size * self._workers
        same = self._kept.assignment.readers == readers
        self._now = self._kept if same else self._kept.assigned_again(readers)

    def take(self) -> tuple[Any, bytes]:
        """Return this rank's next batch, and the bytes about it for all ranks."""
        if self._iterator is None:
            self._stream.reading = self._reading()
            self._iterator = begin(self._loader)
        try:
            mark, batch = next(self._iterator)
        except StopIteration:
            raise SessionError(
                "the DataLoader of the stream has ended, but it must be endless"
            ) from None
        return batch, msgspec.msgpack.encode((self._workers, *mark))

    def trained(self, records: list[bytes]) -> None:
        """Record that all ranks trained on their batches. records: the bytes of each take()."""
        marks = list(self._now.marks)
        batches = self._now.batches
        turned = False
        for rank, words in enumerate(records):
            workers, *mark = msgspec.msgpack.decode(words)
            if workers != self._workers:
                raise SessionError(
                    f"rank {rank} reads the stream with {workers} workers, but this rank with "
                    f"{self._workers}; give the same num_workers on all ranks"
                )
            reader = rank * workers + batches % workers
            turned = turned or mark[0] != marks[reader].turn
            marks[reader] = Mark(*mark)
        now = StreamState(self._now.assignment, tuple(marks), batches + 1)
        # A reader with short parts gets ahead of the others, by no more than an epoch.
        if turned and now.assignment.ahead(now.marks) > self._stream.parts:
            now = now.assigned_again(now.assignment.readers)
            self.close()
        self._kept = self._now = now

    def for_manifest(self) -> dict[str, Any]:
        """Return the position as a checkpoint's manifest shows it."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all readers."""
        assignment = self._kept.assignment
        return {
            **self._stream.identity(),
            "readers": assignment.readers,
            "left": [list(item) for item in assignment.left],
            "fresh": assignment.fresh,
            "marks": [list(mark) for mark in self._kept.marks],
            "batches": self._kept.batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises SessionError: it belongs to another stream."""
        mine = self._stream.identity()
        if not mine.keys() <= state.keys():
            raise SessionError("the state belongs to another kind of loader, not to a stream")
        differing = [name for name in mine if state[name] != mine[name]]
        if differing:
            details = "; ".join(f"{n} is {state[n]!r} there, {mine[n]!r} here" for n in differing)
            raise SessionError(f"the state belongs to another stream: {details}")
        left = tuple(Item(*each) for each in state["left"])
        marks = tuple(Mark(*each) for each in state["marks"])
        self._kept = StreamState(
            PartAssignment(left, state["fresh"], state["readers"]), marks, state["batches"]
        )

    def _reading(self) -> Reading:
        first = self._rank * self._workers
        return Reading(
            assignment=self._now.assignment,
            marks=self._now.marks[first : first + self._workers],
            first=first,
            turned=self._now.batches % self._workers,
        )


def _fresh(readers: int) -> StreamState:
    assignment = PartAssignment((), 0, readers)
    return StreamState(assignment, tuple(assignment.beginning()))
