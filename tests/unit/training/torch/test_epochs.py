"""The loop over epochs in one process without an agent: its order, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rekindle import names
from rekindle.errors import SessionError
from rekindle.training.torch import Session, StepSampler

EPOCHS = 3


@pytest.fixture
def session() -> Iterator[Session]:
    """Yield a Session."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model=model, optimizer=optimizer) as made:
        yield made


def _loader() -> DataLoader[int]:
    return DataLoader(range(10), batch_size=4, shuffle=True)  # type: ignore[arg-type]


def test_the_order_is_that_of_the_loader_itself(session: Session) -> None:
    """Blocks draw random numbers, and the loader and the script draw on as if they had not."""
    torch.manual_seed(5)
    random.seed(5)
    expected = [(batch.tolist(), random.random()) for _ in range(EPOCHS) for batch in _loader()]
    torch.manual_seed(5)
    random.seed(5)
    found, loader = [], _loader()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            with session.step():
                torch.rand(3)
                random.random()
            found.append((batch.tolist(), random.random()))
    assert found == expected
    assert session.finished == len(expected)


def test_an_epoch_may_end_early_and_batches_have_numbers(session: Session) -> None:
    """After `break` the next epoch begins with batch 0."""
    found = []
    for epoch in session.epochs(2):
        for number, _ in session.batches(_loader(), numbered=True):
            with session.step() as step:
                found.append((epoch, number, step.number))
            if number == 1:
                break
        assert session.run(lambda value: value + 1, epoch) == epoch + 1
    assert found == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]


def _no_block(session: Session) -> None:
    for _ in session.epochs(1):
        for _ in session.batches(_loader()):
            pass


def _two_blocks(session: Session) -> None:
    for _ in session.epochs(1):
        for _ in session.batches(_loader()):
            with session.step():
                pass
            with session.step():
                pass


def _no_epoch(session: Session) -> None:
    list(session.batches(_loader()))


def _two_loops(session: Session) -> None:
    for _ in session.epochs(1):
        for _ in range(2):
            for _ in session.batches(_loader()):
                with session.step():
                    pass


def _counted(session: Session) -> None:
    for _ in session.epochs(1):
        for _ in enumerate(session.batches(_loader())):
            pass


def _run_before_block(session: Session) -> None:
    for _ in session.epochs(1):
        for _ in session.batches(_loader()):
            session.run(int)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (_no_block, "this one had no finished"),
        (_two_blocks, "has finished its block"),
        (_no_epoch, "needs an epoch of its own"),
        (_two_loops, "chain several loaders"),
        (_counted, "numbered=True"),
        (_run_before_block, "belongs after the block"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_wrong_loop_is_refused(
    script: Callable[[Session], Any], text: str, session: Session
) -> None:
    """The text has the remedy."""
    with pytest.raises(SessionError, match=text):
        script(session)


def test_a_world_that_may_shrink_is_refused_at_the_start(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when a node has left."""
    monkeypatch.setenv(names.ENV_SHRINKS, "1")
    with pytest.raises(SessionError, match="give one number of nodes, --nnodes N"):
        next(session.epochs(1))


@pytest.mark.parametrize(
    ("name", "value"), [("sampler", StepSampler(8, batch_size=2)), ("per_rank", {"x": [1]})]
)
def test_a_session_with_these_arguments_has_the_other_loop(name: str, value: Any) -> None:
    """A sampler would give another order, and snapshots would lack the state of each rank."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {name: value}
    session = Session(model=model, optimizer=optimizer, **given)
    with session, pytest.raises(SessionError, match=f"leave {name} out"):
        next(session.epochs(1))
