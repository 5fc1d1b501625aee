"""The batches of an epoch after its first ones, with real loaders."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from rekindle.errors import SessionError
from rekindle.training.sampler import StepSampler
from rekindle.training.torch.data.elastic_stream import ElasticStream
from rekindle.training.torch.data.epoch_batches import EpochBatches
from rekindle.training.torch.data.epoch_order import digest
from rekindle.training.torch.state.capture import capture, finish, prepare

SAMPLES = 23
EPOCHS = 3
PLACES = tuple(itertools.product(range(EPOCHS), (0, 1, 4)))  # epoch, and batches to skip
FEW = ((0, 4), (1, 1), (2, 0))  # for loaders with workers, which take time to start

# torchdata 0.11 calls it; torch 2.13 only warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Numbers(Dataset[int]):
    """The numbers from 0. reads: those that were read in this process."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> int:
        self.reads.append(number)
        return number


class Noisy(Numbers):
    """Each sample has random numbers of all generators, and of one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = {"own": np.random.default_rng(5)}

    def __getitem__(self, number: int) -> Any:
        draws = (random.random(), np.random.rand(), self.transform["own"].random())
        return torch.tensor([number, torch.rand(()), *draws], dtype=torch.float64)


class Stream(IterableDataset[int]):
    """An iterable data set that each worker reads in part. It counts its epochs."""

    def __init__(self, *, shuffled: bool = False) -> None:
        self._shuffled = shuffled
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        at, step = (info.id, info.num_workers) if info else (0, 1)
        self.begun += 1
        order = list(range(at + 100 * self.begun, SAMPLES + 100 * self.begun, step))
        if self._shuffled:
            random.shuffle(order)
        yield from order


class ShufflesInPlace(Sampler[list[int]]):
    """Shuffles its own batches in place in each epoch, with NumPy, and counts the epochs."""

    def __init__(self) -> None:
        self.batches = [[i, i + 1] for i in range(0, 20, 2)] + [[20, 21, 22]] * 60
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        np.random.shuffle(self.batches)  # type: ignore[arg-type]
        return iter([[number + 0 * self.epoch for number in each] for each in self.batches[:8]])


class OwnGenerator(Sampler[int]):
    """Draws each index from a generator of its own."""

    def __init__(self) -> None:
        self.draws = random.Random(7)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return (self.draws.randrange(SAMPLES) for _ in range(SAMPLES))


class MakesGenerators(Sampler[int]):
    """Makes its generators, and another object, at the begin of each epoch."""

    def __init__(self) -> None:
        self.epoch = 0
        self.plan: Any = None

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.torch = torch.Generator().manual_seed(self.epoch)
        self.numpy = np.random.default_rng(self.epoch)
        self.legacy = np.random.RandomState(self.epoch)
        self.python = random.Random(self.epoch)
        self.plan = OwnGenerator()
        first = torch.randperm(SAMPLES, generator=self.torch).tolist()
        moves = (self.numpy.integers(3), self.legacy.randint(3), self.python.randrange(3))
        return iter([(number + int(sum(moves))) % SAMPLES for number in first])


class DrawsLate(Sampler[int]):
    """Draws each index as late as possible, from the generator of the process."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(SAMPLES) for _ in range(SAMPLES))


class Hidden(DrawsLate):
    """Its order depends on values that no other object knows."""

    _count = itertools.count()

    def __iter__(self) -> Iterator[int]:
        begin = next(self._count)
        return iter([(begin + i) % SAMPLES for i in range(SAMPLES)])


def tens(samples: list[Any]) -> Any:
    """Collate in an own way."""
    return [10 * sample for sample in samples]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def stateful(data: Dataset[Any], **settings: Any) -> Any:
    """Return a loader of torchdata."""
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(data, **settings)


def distributed(data: Numbers, **settings: Any) -> DistributedSampler[int]:
    return DistributedSampler(data, num_replicas=2, rank=1, **settings)


MADE: dict[str, Callable[[Dataset[Any]], Any]] = {
    "in order": lambda data: DataLoader(data, batch_size=4),
    "shuffle": lambda data: DataLoader(data, batch_size=4, shuffle=True),
    "generator": lambda data: DataLoader(data, batch_size=4, shuffle=True, generator=seeded(3)),
    "drop_last": lambda data: DataLoader(data, batch_size=4, shuffle=True, drop_last=True),
    "distributed": lambda data: DataLoader(data, batch_size=2, sampler=distributed(data)),
    "weighted": lambda data: DataLoader(
        data, batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    ),
    "subset": lambda data: DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(15))),
    "replacement": lambda data: DataLoader(
        data,
        batch_size=9,
        sampler=RandomSampler(data, replacement=True, num_samples=90, generator=seeded(1)),
    ),
    "batch_sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False)
    ),
    "list of batches": lambda data: DataLoader(
        data, batch_sampler=[[i, i + 1] for i in range(0, 14, 2)]
    ),
    "shuffles in place": lambda data: DataLoader(data, batch_sampler=ShufflesInPlace()),
    "own generator": lambda data: DataLoader(data, batch_size=4, sampler=OwnGenerator()),
    "makes generators": lambda data: DataLoader(data, batch_size=4, sampler=MakesGenerators()),
    "draws late": lambda data: DataLoader(data, batch_size=4, sampler=DrawsLate()),
    "no batches": lambda data: DataLoader(data, batch_size=None, shuffle=True),
    "collate_fn": lambda data: DataLoader(data, batch_size=4, shuffle=True, collate_fn=tens),
    "stateful": lambda data: stateful(data, batch_size=4, shuffle=True),
    "workers": lambda data: DataLoader(data, batch_size=4, shuffle=True, num_workers=2),
    "workers, no batches": lambda data: DataLoader(
        data, batch_size=None, shuffle=True, num_workers=2, prefetch_factor=1
    ),
    "workers, own batches": lambda data: DataLoader(
        data, batch_sampler=ShufflesInPlace(), num_workers=1, prefetch_factor=3
    ),
    "workers, stay": lambda data: DataLoader(
        data, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "workers, stay, distributed": lambda data: DataLoader(
        data, batch_size=2, sampler=distributed(data), num_workers=2, persistent_workers=True
    ),
    "workers, stateful": lambda data: stateful(data, batch_size=4, shuffle=True, num_workers=2),
}
WHOLE: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2, 3, 4, 5, 6],
    "function": lambda: lambda: iter(random.sample(range(9), 9)),
    "object": lambda: collections.UserList([3, 1, 2, 5, 4]),
    "stream": lambda: DataLoader(Stream(shuffled=True), batch_size=4),
    "stream, no batches": lambda: DataLoader(Stream(), batch_size=None),
    "stream, workers": lambda: DataLoader(Stream(shuffled=True), batch_size=4, num_workers=2),
}


def plain(batches: Any) -> list[Any]:
    """Return batches as lists, so that they can be compared."""
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in batches]


def begin_process() -> None:
    """Give the generators the states that the script of a new process gives them."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def set_epoch(loader: Any, epoch: int) -> None:
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)


def through_the_format(states: dict[str, Any]) -> dict[str, Any]:
    """Return the states after a way through a snapshot."""

    class Holder:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> Any:
            return self.value

        def load_state_dict(self, value: Any) -> None:
            self.value = value

    captured = capture({"held": Holder(states)})
    other = Holder({})
    empty = prepare({"held": other}, captured.skeleton)
    for name, tensor in captured.tensors.items():
        empty[name].copy_(tensor)
    finish({"held": other})
    assert digest(other.value) == digest(states)
    return other.value


def epochs_of(make: Callable[[], Any]) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Return all batches of the epochs in one process, and the states at the begins."""
    begin_process()
    loader = make()
    batches = EpochBatches(loader)
    found, starts = [], []
    for number in range(EPOCHS):
        set_epoch(loader, number)
        epoch = batches.begin()
        starts.append(through_the_format(epoch.start))
        found.append(plain(epoch))
        assert epoch.taken == len(found[-1])
    batches.close()
    return found, starts


def check_new_processes(make: Callable[[], Any]) -> list[list[Any]]:
    """Check each epoch after some batches, in a new process each; return all batches."""
    found, starts = epochs_of(make)
    for number, skip in FEW if getattr(make(), "num_workers", 0) else PLACES:
        begin_process()
        random.random()  # something else than at the first start
        loader = make()
        batches = EpochBatches(loader)
        set_epoch(loader, number)
        epoch = batches.begin(skip, starts[number])
        assert plain(epoch) == found[number][skip:], (number, skip)
        assert digest(epoch.start) == digest(starts[number])
        if number + 1 < EPOCHS:  # and the next epoch begins in the same states
            set_epoch(loader, number + 1)
            assert digest(batches.states()) == digest(starts[number + 1]), (number, skip)
        batches.close()
    return found


@pytest.mark.process
@pytest.mark.parametrize("kind", MADE)
def test_each_epoch_continues_after_any_batch(kind: str) -> None:
    """The order is the loader's own one, and a new process continues in it.

    It reads none of the skipped samples.
    """
    found = check_new_processes(lambda: MADE[kind](Numbers()))
    begin_process()
    loader = MADE[kind](Numbers())
    for number in range(EPOCHS):
        set_epoch(loader, number)
        assert plain(loader) == found[number], number
    data = Numbers()
    loader = MADE[kind](data)
    if loader.num_workers == 0:
        epoch = EpochBatches(loader).begin(3)
        rest = plain(epoch)
        count = sum(len(each) if isinstance(each, list) else 1 for each in rest)
        assert len(data.reads) == count


@pytest.mark.process
@pytest.mark.parametrize("kind", ["shuffle", "no batches", "workers", "workers, stay, distributed"])
def test_random_numbers_of_a_data_set_belong_to_the_batch(kind: str) -> None:
    """A batch has the same augmentations after a skip, and no draw moves the script's states."""
    found = check_new_processes(lambda: MADE[kind](Noisy()))
    rows = [row for epoch in found for batch in epoch for row in np.atleast_2d(batch).tolist()]
    for column in range(1, 5):
        assert len({row[column] for row in rows}) == len(rows)


@pytest.mark.process
@pytest.mark.parametrize("kind", WHOLE)
def test_other_loaders_are_read_from_their_begin(kind: str) -> None:
    """An iterable data set, a list and a function also continue after any batch."""
    check_new_processes(WHOLE[kind])
    assert (EpochBatches(WHOLE[kind]()).reads is None) == (kind == "list")


def test_the_script_draws_between_batches() -> None:
    """Numbers that the script draws between two batches change no order and no augmentation."""

    def take(batches: EpochBatches) -> list[Any]:
        found = []
        for batch in batches.begin():
            found.append(batch.tolist())
            torch.rand(3), random.random(), np.random.rand()
        return found

    begin_process()
    quiet = plain(EpochBatches(MADE["shuffle"](Noisy())).begin())
    begin_process()
    assert take(EpochBatches(MADE["shuffle"](Noisy()))) == quiet


def test_an_order_that_the_script_draws_from() -> None:
    """If the order and the script draw from one generator in turns, that is an error."""
    for loader in (MADE["draws late"](Numbers()), lambda: iter(random.random, 2)):
        begin_process()
        epoch = EpochBatches(loader).begin()
        next(epoch)
        torch.rand(1)  # another generator than that of the order
        next(epoch)
        random.random()
        with pytest.raises(SessionError, match="draws from the generator random, and the loader"):
            next(epoch)
        assert list(epoch) == []


def test_an_epoch_that_breaks_begins_again() -> None:
    """After an error of the data set the same process gives the same batch again."""
    data = Numbers()
    loader = MADE["shuffles in place"](data)
    begin_process()
    batches = EpochBatches(loader)
    list(batches.begin())
    epoch = batches.begin()
    wanted = [next(epoch).tolist() for _ in range(3)]
    epoch.close()
    assert next(epoch, None) is None
    again = batches.begin(1, epoch.start)
    assert [next(again).tolist() for _ in range(2)] == wanted[1:]
    now = batches.now()
    torch.rand(5)
    batches.restore(now)
    assert digest(batches.now()) == digest(now)


@pytest.mark.parametrize("kind", ["shuffle", "list", "stream"])
def test_more_batches_than_the_epoch_has(kind: str) -> None:
    """A skip to the end gives no batch, and a longer one is an error."""
    make = WHOLE.get(kind) or (lambda: MADE[kind](Numbers()))
    count = len(list(make()))
    assert list(EpochBatches(make()).begin(count)) == []
    with pytest.raises(SessionError, match=f"batch {count + 2} .* gives only {count} batches"):
        EpochBatches(make()).begin(count + 2)
    empty = EpochBatches(DataLoader([], batch_size=2))  # type: ignore[arg-type]
    assert list(empty.begin()) == []
    assert list(empty.begin(0, empty.states())) == []


class OwnIterator(DataLoader[Any]):
    """A loader with batches of its own."""

    def __iter__(self) -> Any:
        return itertools.chain(super().__iter__(), [None])


def test_a_loader_with_an_iterator_of_its_own_is_read() -> None:
    """Such a loader keeps its own batches."""
    batches = EpochBatches(OwnIterator(Numbers(), batch_size=20))
    assert batches.reads == "OwnIterator makes its iterator itself"
    assert list(batches.begin(2)) == [None]


class HoldsIterator(DrawsLate):
    """A sampler whose position is in an iterator."""

    def __init__(self) -> None:
        self.order = itertools.cycle(range(SAMPLES))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: enumerate([1, 2]), r"write enumerate\(session\.batches\(loader\)\)"),
    (lambda: 3, "got a int; give a DataLoader"),
    (lambda: DataLoader(Numbers(), num_workers=1, in_order=False), "in_order=False"),
    (lambda: DataLoader(Numbers(), batch_sampler=StepSampler(9, 1)), "a StepSampler has no epochs"),
    (lambda: DataLoader(ElasticStream(print, 4, seed=1)), "an ElasticStream has a position"),
    (lambda: DataLoader(Stream(), num_workers=1, persistent_workers=True), "persistent_workers"),
    (lambda: DataLoader(Numbers(), sampler=iter(range(9))), "indices only once"),
    (lambda: DataLoader(Numbers(), sampler=HoldsIterator()), r"sampler\.sampler\.order is an iter"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_loaders_that_are_refused(make: Callable[[], Any], message: str) -> None:
    """A loader that no new process can continue is refused at the start, with a remedy."""
    with pytest.raises(SessionError, match=message):
        EpochBatches(make())


def test_an_order_that_does_not_follow_from_the_states() -> None:
    """A sampler with values outside of its attributes is refused at its first epoch."""
    with pytest.raises(SessionError, match="the BatchSampler of the loader gives another order"):
        EpochBatches(DataLoader(Numbers(), sampler=Hidden())).begin()


def test_states_of_another_loader() -> None:
    """States with a generator that the loader lacks are refused."""
    start = EpochBatches(MADE["own generator"](Numbers())).states()
    with pytest.raises(SessionError, match=r"generators sampler\.sampler\.draws, but that of"):
        EpochBatches(MADE["shuffle"](Numbers())).begin(1, start)
