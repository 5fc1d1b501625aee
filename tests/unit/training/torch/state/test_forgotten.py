"""Objects of a script that change in training: found by name, unless the Session keeps them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from rekindle.errors import SessionError
from rekindle.rank import sources
from rekindle.training.torch.state import forgotten
from rekindle.training.torch.state.forgotten import Forgotten


class Meter:
    """A metric with a state of its own."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> Any:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


class Wrapped(torch.optim.SGD):
    """An optimizer that keeps another one, and not its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.Adam(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Trainer:
    """Holds its objects in attributes."""

    def __init__(self, **objects: Any) -> None:
        vars(self).update(objects)


@pytest.fixture(autouse=True)
def _only_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search only this module: a process of many tests has more objects than the search visits."""
    for module in (forgotten, sources):
        monkeypatch.setattr(module, "is_of_library", lambda name, file: file != __file__)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def looked(step: Callable[[], object], *given: Any, ignore: Any = (), **kept: Any) -> None:
    """Do three steps, and look after each."""
    forgotten = Forgotten(kept, [*kept.values(), *given], ignore)
    for number in range(3):
        step()
        forgotten.look(number)


def test_a_scheduler_and_averages_are_found() -> None:
    """The error names the variables, their types and the arguments of the Session."""
    model, optimizer = make()
    rates, ema = StepLR(optimizer, 1), AveragedModel(model)

    def step() -> None:
        train(model, optimizer)
        rates.step()
        ema.update_parameters(model)

    text = (
        r"step 1 changed objects that the Session does not keep, .*: give the Session "
        r"scheduler=rates, or extra=\{'rates': rates\}"
    )
    with pytest.raises(SessionError, match=text) as caught:
        looked(step, model=model, optimizer=optimizer)
    assert "ema (a AveragedModel): give the Session extra={'ema': ema}" in str(caught.value)
    looked(step, model=model, optimizer=optimizer, scheduler=rates, ema=ema)
    looked(step, model=model, optimizer=optimizer, ignore=[rates, "ema"])


@pytest.mark.parametrize(
    "make_it",
    [
        lambda: (each := torch.Generator(), lambda: torch.rand(1, generator=each)),
        lambda: (each := np.random.default_rng(1), each.random),
        lambda: (each := random.Random(1), each.random),
        lambda: (each := np.random.RandomState(1), each.random),
        lambda: (each := Meter(), lambda: vars(each).update(total=each.total + 1)),
        lambda: (each := copy.deepcopy(make()[0]), lambda: each.weight.data.mul_(0.9)),
        lambda: (each := make(), lambda: train(*each)),
        lambda: (
            each := Trainer(inner=[{"a": Meter()}]),
            lambda: vars(each.inner[0]["a"]).update(total=random.random()),
        ),
    ],
    ids=["torch", "numpy", "python", "legacy", "meter", "by hand", "second model", "inside"],
)
def test_each_kind_is_found(make_it: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
    """Generators, metrics, hand-written averages and second models are found by the variable."""
    model, optimizer = make()
    thing, change = make_it()

    def step() -> None:
        train(model, optimizer)
        change()

    with pytest.raises(SessionError, match=r"thing"):
        looked(step, model=model, optimizer=optimizer)
    looked(step, thing, model=model, optimizer=optimizer, ignore=[thing])


def test_an_optimizer_in_the_optimizer_is_found() -> None:
    """The inner optimizer has moments that the outer one does not save."""
    model, _ = make()
    outer = Wrapped(model.parameters())
    with pytest.raises(SessionError, match=r"optimizer\.inner \(a Adam\)"):
        looked(lambda: train(model, outer), model=model, optimizer=outer)


def test_what_does_not_change_or_is_kept_passes() -> None:
    """A teacher, wrappers, losses, loaders and generators that each step seeds are not found."""
    model, optimizer = make()
    teacher, loss, wrapper = copy.deepcopy(model).eval(), nn.SmoothL1Loss(), nn.Sequential(model)
    compiled = torch.compile(model, backend="eager")
    parts = [StepLR(optimizer, 2), StepLR(optimizer, 3)]
    rates = SequentialLR(optimizer, parts, [2])
    order = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.ones(8, 3))
    loader = DataLoader(data, 2, shuffle=True, generator=order)
    seeded, default = torch.Generator(), torch.default_generator
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        train(wrapper, optimizer)
        teacher(torch.ones(1, 3))
        compiled(torch.ones(1, 3))
        loss(torch.ones(1), torch.zeros(1))
        rates.step()
        next(iter(loader))
        seeded.manual_seed(number)
        torch.rand(1, generator=seeded)
        torch.rand(1, generator=default)

    looked(step, model=model, optimizer=optimizer, scheduler=rates)
    assert parts[0].last_epoch > 0
