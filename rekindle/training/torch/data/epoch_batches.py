"""Give the batches of one epoch of a loader after its first ones, in the loader's own order.

Batch k of an epoch depends only on the states at the begin of its iterator and on k. So a new
process that has these states continues at any batch. The data set draws its random numbers for each
batch from streams of (states at the begin, k), in workers and in this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from rekindle.errors import SessionError
from rekindle.training.sampler import StepSampler
from rekindle.training.torch import private
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.elastic_stream import ElasticStream
from rekindle.training.torch.data.epoch_order import EpochOrder, Watch, digest, generators_of, mark

_TRIED = 64  # batches of a script's own sampler whose order is compared with a second one
_AT_HAND = (list, tuple, range, torch.Tensor)  # all batches exist, so skipping reads none
# Options of a DataLoader that a copy of it has, too.
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
    "in_order",
)
_worker: tuple[Any, list[Any]] = (None, [])  # the data set of this worker, and its generators


class EpochBatches:
    """The batches of each epoch of one loader. Make one object for each loader, and keep it.

    loader: a DataLoader, another iterable of batches, or a function that returns one.
    reads: a text for one line, such as "its data set is iterable", if a new process reads the
    batches that it skips. None: it skips indices, and reads no skipped sample.
    """

    def __init__(self, loader: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        """Check the loader. Raises SessionError: its order cannot be the same in a new process."""
        _check(loader)
        self.reads = _reason_to_read(loader)
        self._loader: Any = loader
        self._indexed: _Indexed | None = None
        roots: dict[str, Any] = {}
        if isinstance(loader, DataLoader):
            roots["loader.generator"] = loader.generator
            if self.reads is None:
                self._indexed = _Indexed(loader)
                roots["sampler"] = self._indexed.sampler
            elif isinstance(loader.dataset, IterableDataset):
                roots["dataset"] = loader.dataset
        if not isinstance(loader, _AT_HAND) and not private.iterates_like_torch(loader):
            roots["loader"] = loader
        self._order = EpochOrder(roots)
        self._epochs = 0  # that have begun, also in processes before this one
        self._is_known = self._indexed is None or self._order.is_of_torch()

    def states(self) -> dict[str, Any]:
        """Return the present states of all that decides the order of an epoch, as a new value.

        The generators of torch (CPU), `random` and `numpy.random`, those of the loader and of its
        samplers, and the samplers' own counters and lists. The state format can hold the value.
        Take it before begin() for a new epoch, or read `Epoch.start`.
        Raises SessionError: a value that a sampler has changed is too large.
        """
        return {**self._order.states(), "epochs": self._epochs}

    def now(self) -> dict[str, Any]:
        """Return only the states of the generators, for restore() in the middle of an epoch."""
        return self._order.generator_states()

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set the generators, and the samplers, to the value of states() or now().

        Raises SessionError: it belongs to another loader.
        """
        self._order.restore(states)

    def begin(self, skip: int = 0, start: Mapping[str, Any] | None = None) -> Epoch:
        """Begin an epoch after its first `skip` batches.

        start: the states at the begin of this epoch (`Epoch.start`), which it restores first. None:
        the present states. After it, the generators have the states that the first `skip` batches
        leave, if nothing else draws: the caller then sets those that the script has drawn from.
        Raises SessionError: the epoch has fewer than `skip` batches, `start` belongs to
        another loader, or the order of the script's own sampler does not follow from the states.
        """
        if start is not None:
            self.restore(start)
        elif not self._is_known:
            self._try_sampler()
        self._is_known = True
        found = self.states() if start is None else dict(start)
        self._epochs = found["epochs"] + 1
        watch = Watch(self._order.generators())
        if self._indexed is None:
            return Epoch(found, skip, _Reading(self._loader, skip, watch))
        if found["epochs"] == 0:
            self.close()  # the workers of a first epoch are new
        elif self._indexed.lacks_workers:
            before = self.now()
            self._indexed.make_workers()
            self.restore(before)
        # Not from the values: in this process other ones may have been the first.
        seed = digest([found["epochs"], found["generators"]])
        return Epoch(found, skip, self._indexed.begin(skip, seed, watch))

    def close(self) -> None:
        """End persistent workers."""
        if self._indexed is not None:
            self._indexed.close()

    def _try_sampler(self) -> None:
        """Compare two orders of the script's own sampler from the same states."""
        sampler = self._indexed.sampler if self._indexed is not None else []
        before = self._order.states(changed=False)
        marks = []
        for _ in range(2):
            marks.append(mark(list(itertools.islice(iter(sampler), _TRIED))))
            self._order.restore(before)
        if marks[0] != marks[1]:
            raise SessionError(
                f"the {type(sampler).__name__} of the loader gives another order when it begins "
                "again with the same states, so a new process could not continue in its epoch; "
                "draw the order from torch, random or numpy.random, or from a generator that is an "
                "attribute of the sampler"
            )


class Epoch(Iterator[Any]):
    """The remaining batches of one epoch.

    start: the states at its begin (before batch 0). taken: batches that it has given or skipped.
    """

    def __init__(self, start: dict[str, Any], taken: int, source: _Source) -> None:
        self.start = start
        self.taken = taken
        self._source: _Source | None = source

    def __next__(self) -> Any:
        """Return the next batch.

        The random numbers that a map-style data set draws in this process do not move the
        generators of the script. Raises SessionError: the order depends on a generator that the
        script has drawn from.
        """
        if self._source is None:
            raise StopIteration
        try:
            batch = self._source.take()
        except StopIteration:
            raise
        except BaseException:
            self._source.close()  # its workers may be broken
            self._source = None
            raise
        self.taken += 1
        return batch

    def close(self) -> None:
        """Give no more batches, and end the loader's workers, if they are not persistent."""
        self._source = None


class _Reading:
    """Reads an epoch from its begin, and drops the batches to skip."""

    def __init__(self, loader: Any, skip: int, watch: Watch) -> None:
        made = loader if hasattr(loader, "__iter__") or not callable(loader) else loader()
        batches = iter(made)
        self._watch = watch
        if isinstance(loader, _AT_HAND):
            _check_count(min(skip, len(loader)), skip)
            batches, skip = itertools.islice(batches, skip, None), 0
        self._batches = batches
        for number in range(skip):
            try:
                self.take()
            except StopIteration:
                _check_count(number, skip)

    def take(self) -> Any:
        """Return the next batch."""
        return self._watch.draw(self._batches.__next__)

    def close(self) -> None:
        """Do nothing: the epoch drops the iterator."""


class _Indexed:
    """Gives batches of a map-style DataLoader, through a copy of it with another index sampler.

    sampler: the one of the given loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        by_batch = loader.batch_sampler is not None
        self.sampler: Any = loader.batch_sampler if by_batch else loader.sampler
        self._loader = loader
        self._indices = _Indices(self.sampler, sends=loader.num_workers > 0)
        self._copy: DataLoader[Any] | None = None  # its workers stay for all epochs

    @property
    def lacks_workers(self) -> bool:
        """Whether the workers are persistent, and do not exist."""
        return self._loader.persistent_workers and self._copy is None

    def make_workers(self) -> None:
        """Make persistent workers, as an epoch before this one has done."""
        self._copy = _copy_of(self._loader, self._indices)
        self._indices.arm(None)
        iter(self._copy)

    def begin(self, skip: int, seed: int, watch: Watch) -> _FromIndices:
        """Begin an epoch. Raises SessionError: it has fewer than `skip` batches."""
        copy, self._copy = self._copy or _copy_of(self._loader, self._indices), None
        own = [] if self._indices.sends else generators_of(copy.dataset)
        self._indices.arm(_Plan(skip, seed, own, watch))
        batches = iter(copy)
        indices = self._indices.last
        assert indices is not None
        indices.skip()
        if copy.persistent_workers:
            self._copy = copy
        return _FromIndices(batches, indices, self.close)

    def close(self) -> None:
        """End persistent workers."""
        self._copy = None


class _FromIndices:
    """The batches of a copied loader."""

    def __init__(self, batches: Iterator[Any], indices: _Run, fail: Callable[[], None]) -> None:
        self._batches = batches
        self._indices = indices
        self.close = fail

    def take(self) -> Any:
        """Return the next batch."""
        try:
            return next(self._batches)
        finally:
            self._indices.leave_streams()


_Source = _Reading | _FromIndices


@dataclass(frozen=True, slots=True)
class _Plan:
    """The values for an epoch. own: generators in the data set, if this process reads it."""

    skip: int
    seed: int
    own: list[Any]
    watch: Watch


class _Indices:
    """The index sampler of a copied loader.

    last: the iterator that it has made last. With workers torch makes two at its first epoch, as
    with the loader's own sampler. sends: workers get the indices.
    """

    def __init__(self, sampler: Any, *, sends: bool) -> None:
        self._sampler = sampler
        self._plan: _Plan | None = None
        self.sends = sends
        self.last: _Run | None = None

    def arm(self, plan: _Plan | None) -> None:
        """Set the plan of the next iterators. None: they give nothing."""
        self._plan = plan

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._plan is None:
            return iter(())
        self.last = _Run(iter(self._sampler), self._plan, sends=self.sends)
        return self.last


class _Run(Iterator[Any]):
    """The indices of one epoch's batches after the skipped ones."""

    def __init__(self, inner: Iterator[Any], plan: _Plan, *, sends: bool) -> None:
        self._inner = inner
        self._plan = plan
        self._sends = sends
        self._number: int | None = None  # of the next batch; None: nothing is skipped yet
        self._own: list[Any] | None = None  # states of the data set's generators before a batch

    def skip(self) -> None:
        """Skip the first batches now. Raises SessionError: the epoch has fewer."""
        if self._number is None:
            self._number = self._plan.skip
            skipped = itertools.islice(self._inner, self._plan.skip)
            found = self._plan.watch.draw(lambda: sum(1 for _ in skipped))
            _check_count(found, self._plan.skip)

    def __next__(self) -> Any:
        self.skip()
        assert self._number is not None
        indices = self._plan.watch.draw(self._inner.__next__)
        number = self._number
        self._number += 1
        if self._sends:
            return _Sent(indices, self._plan.seed, number)
        self._own = [rng.state_of(each) for each in self._plan.own]
        rng.begin_batch(self._plan.seed, number, self._plan.own)
        return indices

    def leave_streams(self) -> None:
        """Set all generators to their states from before the data set has read a batch."""
        if self._own is not None:
            self._plan.watch.leave()
            for each, state in zip(self._plan.own, self._own, strict=True):
                rng.set_state(each, state)
            self._own = None


class _Sent:
    """The indices of a batch on the way to a worker, which then seeds its generators for it."""

    def __init__(self, indices: Any, seed: int, number: int) -> None:
        self._arguments = indices, seed, number

    def __reduce__(self) -> Any:
        return _received, self._arguments


def _received(indices: Any, seed: int, number: int) -> Any:
    """Return the indices, after a worker has received them and before it reads the samples."""
    global _worker
    info = get_worker_info()
    if info is not None:
        if _worker[0] is not info.dataset:
            _worker = info.dataset, generators_of(info.dataset)
        rng.begin_batch(seed, number, _worker[1])
    return indices


def _copy_of(loader: DataLoader[Any], indices: _Indices) -> DataLoader[Any]:
    """Return the loader with other indices. It shares all objects with the given one."""
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    if loader.batch_sampler is None:
        options |= {"batch_size": None, "sampler": indices}
    else:
        options["batch_sampler"] = indices
    known = {DataLoader.__name__, "StatefulDataLoader"}  # the second one is of torchdata
    kind: Any = next(each for each in type(loader).__mro__ if each.__name__ in known)
    return cast(DataLoader[Any], kind(loader.dataset, **options))


def _check_count(found: int, wanted: int) -> None:
    if found < wanted:
        raise SessionError(
            f"the state is after batch {wanted} of an epoch, but the loader gives only {found} "
            "batches; the data set, the batch size or the number of ranks is another one. Continue "
            "with those of the run before"
        )


def _reason_to_read(loader: Any) -> str | None:
    """Return why skipped batches must be read; None: only their indices are skipped."""
    if isinstance(loader, _AT_HAND):
        return None
    if not isinstance(loader, DataLoader):
        if not hasattr(loader, "__iter__") and callable(loader):
            return "a function makes its batches"
        return f"it is a {type(loader).__name__}, not a DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable"
    if not private.iterates_like_torch(loader):
        return f"{type(loader).__name__} makes its iterator itself"
    return None


def _check(loader: Any) -> None:
    """Raise SessionError for a loader that cannot begin again in a new process."""
    name = type(loader).__name__
    if isinstance(loader, Iterator):
        raise SessionError(
            f"batches() got a {name}, which gives its batches only once, so no process could begin "
            "its epoch again; give the DataLoader itself, or a function that returns the iterator. "
            "Instead of enumerate(loader) write enumerate(session.batches(loader))"
        )
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__") or callable(loader)):
        raise SessionError(f"batches() got a {name}; give a DataLoader, or another iterable")
    if type(loader).__module__.partition(".")[0] == "accelerate":
        raise SessionError(
            f"batches() got a {name} of Accelerate, which exchanges the states of generators at "
            "the begin of each epoch; give the DataLoader without Accelerator.prepare()"
        )
    if isinstance(loader, DataLoader):
        for is_wrong, text in _refusals(loader):
            if is_wrong:
                raise SessionError(text)


def _refusals(loader: DataLoader[Any]) -> Iterator[tuple[bool, str]]:
    """Yield whether a DataLoader has a property that no new process can repeat, with the text."""
    data, samplers = loader.dataset, (loader.batch_sampler, loader.sampler)
    yield (
        loader.num_workers > 0 and not getattr(loader, "in_order", True),  # torch 2.6 has it
        "with in_order=False the order of batches depends on the speed of the workers, so no other "
        "process can continue in an epoch; leave it out",
    )
    yield (
        any(isinstance(each, StepSampler) for each in samplers),
        "a StepSampler has no epochs; use it with session.steps(), or give the loader another "
        "sampler, such as DistributedSampler(dataset)",
    )
    yield (
        isinstance(data, ElasticStream),
        "an ElasticStream has a position of its own; use it with session.steps() and "
        "Session(loader=...)",
    )
    yield (
        isinstance(data, IterDataPipe),
        "an IterDataPipe exchanges a seed between all ranks at the begin of each epoch, which a "
        "new process cannot repeat alone; give an IterableDataset",
    )
    yield (
        isinstance(data, IterableDataset) and loader.persistent_workers,
        "with persistent_workers=True and an iterable data set the workers keep what they have "
        "read and drawn in earlier epochs, which a new process does not know; leave "
        "persistent_workers out",
    )
    yield (
        any(isinstance(each, Iterator) for each in samplers),
        "the loader's sampler is an iterator, which gives its indices only once; give a list or a "
        "Sampler",
    )
