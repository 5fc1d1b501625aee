"""Loaders in a Session: the ones that it refuses, and their batches in one process."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from waiting import run_command

from rekindle.errors import SessionError
from rekindle.training.torch import ElasticStream, MicroBatch, Session, StepSampler
from rekindle.training.torch.data.all_gather import Sharing, pack, unpack
from rekindle.training.torch.data.session_data import Data
from rekindle.training.torch.state.capture import capture, finish, prepare

SIZES = (3, 0, 5, 1)

# torchdata 0.11 calls it; torch 2.13 only warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def read(part: int, epoch: int, start: int) -> Iterator[int]:
    """Yield samples whose numbers contain their epoch, part and place."""
    for number in range(start, SIZES[part]):
        yield 100 * epoch + 10 * part + number


def session_of(**settings: Any) -> Session:
    """Return a session of a small model."""
    model = torch.nn.Linear(2, 1)
    return Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def test_another_sampler_is_refused() -> None:
    """The error names what takes its place."""
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    with pytest.raises(SessionError, match=r"^sampler is a DistributedSampler, .*session\.batches"):
        session_of(sampler=sampler)


def loader_of(**settings: Any) -> DataLoader[Any]:
    """Return a loader of the stream above."""
    return DataLoader(ElasticStream(read, len(SIZES), seed=1), **{"batch_size": 2, **settings})


def data_of(loader: Any, *, full_world: int = 1) -> Data:
    """Return the data of a Session."""
    return Data(None, loader, full_world, in_parts=False)


class Broken(IterableDataset[int]):
    """A dataset of `count` samples, whose state contains `state`."""

    def __init__(self, count: int, state: Any) -> None:
        self._count, self._state = count, state

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def state_dict(self) -> dict[str, Any]:
        return {"thing": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def stateful(*arguments: Any, **settings: Any) -> Any:
    """Return a loader of torchdata."""
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(*arguments, **settings)


SAMPLER = StepSampler(10, 2)
REFUSED = [
    ({"loader": DataLoader([1, 2])}, "loader is a DataLoader, but a Session can keep"),
    ({"loader": [1, 2]}, "loader is a list, but a Session can keep"),
    ({"loader": DataLoader([1, 2], sampler=SAMPLER)}, "batch_sampler=sampler"),
    ({"loader": loader_of(), "sampler": SAMPLER}, "leave the sampler out"),
    (
        {"loader": DataLoader([1, 2], batch_sampler=StepSampler(2, 1)), "sampler": SAMPLER},
        "the sampler of Session are different",
    ),
    (
        {"loader": loader_of(), "extra": {"loader": SAMPLER}},
        "Session uses the name 'loader' itself",
    ),
    ({"loader": loader_of(), "keep_global_batch": True}, "only a loader with batch_sampler"),
    ({"loader": loader_of(num_workers=1, persistent_workers=True)}, "persistent_workers=True"),
    ({"loader": loader_of(num_workers=1, in_order=False)}, "in_order=False"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_loaders_that_are_refused(settings: dict[str, Any], message: str) -> None:
    """A Session refuses a loader without a usable position when it starts, and names a remedy."""
    with pytest.raises(SessionError, match=message):
        session_of(**settings)


def test_a_stream_needs_a_part_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Session refuses a stream with fewer parts than ranks in the full world."""
    monkeypatch.setenv("REKINDLE_FULL_WORLD", "5")
    with pytest.raises(SessionError, match="4 parts for 5 ranks"):
        session_of(loader=loader_of())


def test_batches_are_asked_for_in_each_step() -> None:
    """A step that does not use its batch is an error, and so is a batch without a loader."""
    with session_of(loader=loader_of()) as session:
        step = next(session.steps(1))
        with pytest.raises(SessionError, match=r"use step\.batch in each step"), step:
            pass
        assert session.finished == 0
    with session_of() as session:
        for step in session.steps(1):
            with step, pytest.raises(SessionError, match="give Session a loader"):
                _ = step.batch


def test_the_parts_of_a_step_have_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a full world of three, a single rank gets the batches of all three shares in each step."""
    monkeypatch.setenv("REKINDLE_FULL_WORLD", "3")
    loader = DataLoader(range(20), batch_sampler=StepSampler(20, 2, shuffle=False))
    with session_of(loader=loader, keep_global_batch=True) as session:
        for step in session.steps(3):
            with step:
                parts = list(step.parts())
                begin = 6 * step.number
                assert parts == [MicroBatch([begin + i, begin + i + 1], 1 / 3) for i in (0, 2, 4)]
                assert [part.batch.tolist() for part in parts] == [part.indices for part in parts]
                with pytest.raises(SessionError, match=r"part\.batch"):
                    _ = step.batch


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_stream_in_one_process(batch_size: int | None) -> None:
    """Each sample occurs once per epoch, in batches or alone, and the order of the parts varies.

    Within a step, `step.batch` is always the same object.
    """
    seen: list[int] = []
    loader = loader_of(batch_size=batch_size)
    with session_of(loader=loader) as session:
        for step in session.steps(36 // (batch_size or 1)):
            with step:
                assert step.batch is step.batch
                seen += torch.as_tensor(step.batch).reshape(-1).tolist()
    epochs = [seen[i : i + 9] for i in range(0, 36, 9)]
    for number, each in enumerate(epochs):
        wanted = [sample for part in range(4) for sample in read(part, number, 0)]
        assert sorted(each) == wanted
    assert len({tuple(n % 100 for n in each) for each in epochs}) > 1


def test_a_stream_is_repositioned_to_what_was_trained() -> None:
    """After a recovery, the loader repeats a batch that was not trained.

    Another process that loads the position as a state gets the same batch.
    """
    data = data_of(loader_of())
    data.bind(0, 1, None)
    trained = []
    for _ in range(3):
        trained.append(data.take().tolist())
        data.advance()
    lost = data.take().tolist()
    state = capture(data.named)
    data.bind(0, 1, None)
    assert data.take().tolist() == lost
    other = data_of(loader_of())
    prepare(other.named, state.skeleton)
    finish(other.named)
    other.bind(0, 1, None)
    assert other.take().tolist() == lost
    assert other.position() == data.position()
    assert lost not in trained


def test_generations_that_nobody_trained_in_assign_nothing() -> None:
    """Worlds that end without a step do not change the position or the samples of a rank."""
    saw, missed = data_of(loader_of(), full_world=4), data_of(loader_of(), full_world=4)
    for world_size in (4, 3, 1, 4):
        saw.bind(0, world_size, None)
    missed.bind(0, 4, None)
    assert saw.position() == missed.position()
    assert saw.take().tolist() == missed.take().tolist()


def test_a_stream_without_a_session() -> None:
    """Without a Session, a stream raises SessionError: it does not belong to a rank."""
    with pytest.raises(SessionError, match="does not belong to a rank yet"):
        next(iter(loader_of()))


def test_a_stream_without_a_sample() -> None:
    """If all parts are empty, the stream raises SessionError, and does not search without end."""
    data = data_of(DataLoader(ElasticStream(lambda *_: (), 2)))
    data.bind(0, 1, None)
    with pytest.raises(SessionError, match="no sample for"):
        data.take()


@pytest.mark.parametrize(
    ("parts", "seed", "read", "message"),
    [(0, 0, read, "parts"), (2, -1, read, "seed"), (2, 0, [1], r"read\(part, epoch, start\)")],
)
def test_streams_that_are_refused(parts: int, seed: int, read: Any, message: str) -> None:
    """A stream refuses an invalid argument when a script creates it, and names the argument."""
    with pytest.raises(SessionError, match=message):
        ElasticStream(read, parts, seed=seed)


def test_the_position_of_another_stream_is_refused() -> None:
    """A stream refuses the position of a stream with other parts, or of another kind of loader."""
    data = data_of(loader_of())
    state = data.named["loader"].state_dict()
    with pytest.raises(SessionError, match="parts is 5 there, 4 here"):
        data.named["loader"].load_state_dict({**state, "parts": 5})
    other = data_of(stateful(range(3)))
    with pytest.raises(SessionError, match="belongs to a stream"):
        other.named["loader"].load_state_dict(state)
    with pytest.raises(SessionError, match="another kind of loader"):
        data.named["loader"].load_state_dict(other.named["loader"].state_dict())


class Hiccups(list[int]):
    """Indexed data that fails once, in the middle of a batch."""

    failed = False

    def __getitem__(self, index: Any) -> Any:
        if index == 5 and not self.failed:
            self.failed = True
            raise OSError("not now")
        return super().__getitem__(index)


@pytest.mark.parametrize("own", [False, True])
def test_a_batch_that_failed_is_tried_again(own: bool) -> None:
    """If a script catches an error of its data and asks again, it gets the same batch."""
    numbers = Hiccups(range(12))
    sampler = StepSampler(12, 2, shuffle=False)
    loader = stateful(numbers, batch_size=2) if own else DataLoader(numbers, batch_sampler=sampler)
    with session_of(loader=loader) as session:
        seen = []
        for step in session.steps(4):
            with step:
                try:
                    seen.append(step.batch.tolist())
                except OSError:
                    seen.append(step.batch.tolist())
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_stateful_loaders_go_through_epochs_and_back() -> None:
    """A StatefulDataLoader starts each new epoch automatically, and continues from each state."""
    generator = torch.Generator().manual_seed(4)
    data = data_of(stateful(range(7), batch_size=3, shuffle=True, generator=generator))
    data.bind(0, 1, None)
    seen, states = [], []
    for _ in range(8):
        states.append(capture(data.named))
        seen.append(data.take().tolist())
        data.advance()
    epochs = [list(itertools.chain(*seen[i : i + 3])) for i in (0, 3)]
    assert [sorted(each) for each in epochs] == [list(range(7))] * 2
    assert epochs[0] != epochs[1]
    for first in (0, 2, 3, 5, 6):
        generator = torch.Generator().manual_seed(4)
        data = data_of(stateful(range(7), batch_size=3, shuffle=True, generator=generator))
        targets = prepare(data.named, states[first].skeleton)
        for name, target in targets.items():
            target.copy_(states[first].tensors[name])
        finish(data.named)
        data.bind(0, 1, None)
        for batch in seen[first:]:
            assert data.take().tolist() == batch
            data.advance()


def test_stateful_loaders_that_cannot_go_on() -> None:
    """A stateful loader without batches, with an unsupported state or in another world is refused.

    The error names the reason.
    """
    data = data_of(stateful(Broken(0, 1)))
    data.bind(0, 1, None)
    with pytest.raises(SessionError, match="no batch in an epoch"):
        data.take()
    data = data_of(stateful(Broken(9, object())))
    data.bind(0, 1, None)
    with pytest.raises(
        SessionError,
        match=r"loader\.loader\..*thing: a state cannot contain a value of type object",
    ):
        data.take()
    data = data_of(stateful(Broken(9, 1)))
    data.bind(0, 1, None)
    data.take()
    data.advance()
    with pytest.raises(
        SessionError, match=r"states belong to 1 ranks, but this world has 2.*Elastic"
    ):
        data.bind(0, 2, None)


def test_torchdata_reads_samplers_and_streams_too() -> None:
    """A StatefulDataLoader of a StepSampler or an ElasticStream also continues in other worlds."""
    for loader, plain in (
        (
            stateful(range(9), batch_sampler=StepSampler(9, 2)),
            DataLoader(range(9), batch_sampler=StepSampler(9, 2)),
        ),
        (
            stateful(ElasticStream(read, 4, seed=1), batch_size=2),
            loader_of(),
        ),
    ):
        data, wanted = data_of(loader), data_of(plain)
        for each in (data, wanted):
            each.bind(0, 1, None)
        for world_size in (1, 1, 1, 2, 2, 1):
            for each in (data, wanted):
                each.bind(0, world_size, None)
            assert data.take().tolist() == wanted.take().tolist()
            if world_size == 1:
                data.advance()
                wanted.advance()


def test_what_is_told_arrives() -> None:
    """A packed state with tensors is the same after unpacking; a single process gets its own."""
    state = {"a": [1, None, 2**70], "t": torch.arange(5, dtype=torch.bfloat16), "e": torch.zeros(0)}
    found = unpack(pack(state, "x"))
    assert found["a"] == state["a"]
    assert torch.equal(found["t"], state["t"])
    assert found["e"].shape == (0,)
    assert Sharing().all_gather(b"word") == [b"word"]


@pytest.mark.process
def test_the_example_of_the_docs(tmp_path: Path) -> None:
    """The example of streams in docs/train/data.md runs without an error.

    It runs in its own process, because its workers fork.
    """
    text = ROOT.joinpath("docs", "train", "data.md").read_text()
    (example,) = re.findall(r"```python\n(import.*?)```", text, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    ran = run_command([sys.executable, "example.py"], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
