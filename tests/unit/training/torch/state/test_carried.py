"""Variables that carry values from step to step are found; those that each step sets are not."""

from __future__ import annotations

import array
import functools
import time
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rekindle.errors import SessionError
from rekindle.training.sampler import StepSampler
from rekindle.training.torch.state import carried, script_names
from rekindle.training.torch.state.carried import Carried

STEPS = 6
COUNT = 0


class Meter:
    """Counts in one attribute, and sets another one in each step."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def see(self, value: float) -> None:
        self.value = value
        self.count += 1


class Warm(nn.Module):
    """A network with a temperature that falls in each forward pass, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.temperature = 1.0
        self.auxiliary: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.auxiliary = y.square().mean()
        self.temperature = max(0.5, self.temperature * 0.9)
        return y / self.temperature


class Kept(Warm):
    """The same with the temperature in its state."""

    def get_extra_state(self) -> Any:
        return self.temperature

    def set_extra_state(self, state: Any) -> None:
        self.temperature = state


class Cold(nn.Module):
    """The same without a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.auxiliary: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.auxiliary = y.square().mean()
        return y


@pytest.fixture(autouse=True)
def _only_this_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Search only this module: a process of many tests has more objects than the search visits."""
    caches: Any = (script_names.is_of_script, script_names.has_names, script_names._modules)
    monkeypatch.setattr(script_names, "is_of_library", lambda name, file: file != __file__)
    for each in (*caches, carried.is_set_from_itself):
        each.cache_clear()
    yield
    for each in (*caches, carried.is_set_from_itself):
        each.cache_clear()


def steps(ignore: Any = (), kept: Any = ()) -> Iterator[tuple[None, int]]:
    """Return pairs with the numbers of steps; this function does not run in the loop."""
    looks = map(Carried(kept, ignore).look, range(STEPS), range(STEPS))
    return zip(looks, range(STEPS), strict=True)


def test_a_sum_is_found() -> None:
    """The error names the variables, and what to do."""

    def train(*ignore: str) -> None:
        total, best = 0.0, 9.0
        for _, number in steps(ignore):
            loss = 1.0 / (1 + number)
            total += loss
            best = min(best, loss)
        assert total > best

    text = r"^step 1 changed best, total, which .*ignore=\['best', 'total'\]$"
    with pytest.raises(SessionError, match=text):
        train()
    train("total", "best")


def test_what_a_step_sets_before_it_reads_it_is_not_found() -> None:
    """Nor what the first step makes, times of a clock, and names that only the loop has."""
    loss, first, begin, last = 0.0, True, time.time(), None
    for _, number in steps():
        if first:
            first = False
        elapsed = time.time() - begin
        begin = time.time()
        loss = number + 0.5 + 0 * elapsed
        last = loss
        seen = last if number == 0 else seen + 1  # noqa: F821  only the loop has it
    assert last == loss
    assert seen > 0


def _changes_each() -> dict[str, tuple[Any, Callable[[Any, int], object]]]:
    generators: dict[str, tuple[Any, Callable[[Any, int], object]]] = {
        "list": ([], lambda each, n: each.append(n)),
        "dict": ({"a": 0.0}, lambda each, n: each.update({n: n})),
        "nested": ({"a": [{"b": 0}]}, lambda each, n: each["a"][0].update({n: n})),
        "deque": (deque(maxlen=2), lambda each, n: each.append(n)),
        "array": (np.zeros(3), lambda each, n: each.__setitem__(0, n)),
        "tensor": (torch.zeros(3), lambda each, n: each.add_(1)),
        "leaf": (torch.zeros(3, requires_grad=True), lambda each, n: each.data.add_(1)),
        "average": ([torch.zeros(2)], lambda each, n: each[0].mul_(0.5).add_(n)),
        "loader": (iter(DataLoader(list(range(99)))), lambda each, n: next(each)),
        "endless": ((n for n in range(99)), lambda each, n: next(each)),
        "object": (Meter(), lambda each, n: each.see(n)),
        "namespace": (SimpleNamespace(m=Meter()), lambda each, n: each.m.see(n)),
        "partial": (functools.partial(sum, [0.0]), lambda each, n: each.args[0].append(n)),
        "wrapper": (UserDict(), lambda each, n: each.update({n: n})),
        "counts": (_array(), lambda each, n: each.__setitem__(0, n)),
        "default": (_remembers(), lambda each, n: each(n)),
        "function": (_counter(), lambda each, n: each()),
    }
    return generators


def _array() -> array.array[int]:
    return array.array("l", [0])


def _remembers() -> Callable[[int], object]:
    def remember(n: int, seen: list[int] = []) -> None:  # noqa: B006
        seen.append(n)

    return remember


def _counter() -> Callable[[], int]:
    called = 0

    def counts() -> int:
        nonlocal called
        called = called + 1
        return called

    return counts


@pytest.mark.parametrize("name", _changes_each())
def test_each_kind_is_found(name: str) -> None:
    """Containers, arrays, tensors, iterators and objects that a step changes in place."""
    thing, change = _changes_each()[name]

    def train(thing: Any, given: Iterator[tuple[None, int]]) -> None:
        for _, number in given:
            change(thing, number)

    with pytest.raises(SessionError, match="step 1 changed thing") as caught:
        train(thing, steps())
    assert ("use step.batch" in str(caught.value)) == (name in ("loader", "endless"))
    train(thing, steps(ignore=["thing"]))
    train(thing, steps(kept=[{"x": thing}]))


def test_an_iterator_that_the_loop_makes_is_found() -> None:
    """A new process would make it again, at its begin; not if the Session keeps its position."""
    data = list(range(99))

    def train(loader: DataLoader[int]) -> None:
        batches = None
        del batches
        for _, number in steps():
            if number == 0:
                batches = iter(loader)
            next(batches)

    with pytest.raises(SessionError, match=r"step 1 changed batches, .* use step\.batch"):
        train(DataLoader(data))
    sampler = StepSampler(len(data), 4)
    sampler.bind(0, 1)
    train(DataLoader(data, batch_sampler=sampler))


def test_entries_of_a_dict_that_each_step_sets_are_not_found() -> None:
    """The activations that a hook keeps; but an entry that follows from itself is found."""
    activations: dict[str, torch.Tensor] = {}
    carried_on = {"h": torch.zeros(2)}

    def hook(number: int) -> None:
        activations["first"] = torch.full((2,), float(number))

    def train(*ignore: str) -> None:
        for _, number in steps(ignore):
            hook(number)
            carried_on["h"] = carried_on["h"] + activations["first"]

    with pytest.raises(SessionError, match="step 1 changed carried_on, which"):
        train()
    train("carried_on")


def test_attributes_of_the_model_are_found() -> None:
    """A value that the forward pass reads and sets; not one that it only sets."""
    for model, wrong in ((Warm(), True), (Kept(), False), (Cold(), False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        group = optimizer.param_groups[0]

        def train(model: Any = model, optimizer: Any = optimizer, group: Any = group) -> None:
            for _, number in steps(kept=[model, optimizer]):
                group["lr"] = 0.1 / (1 + number)
                optimizer.zero_grad()
                (model(torch.ones(2, 2)).mean() + model.auxiliary).backward()
                optimizer.step()

        if wrong:
            with pytest.raises(SessionError, match=r"step 1 changed model.temperature, which"):
                train()
        else:
            train()


def test_a_variable_of_a_module_is_found() -> None:
    """A function counts in a variable of its module."""
    with pytest.raises(SessionError, match="step 1 changed COUNT, which"):
        _count_steps()


def _count_steps() -> None:
    global COUNT
    for _ in steps():
        COUNT += 1


def test_memory_of_gradients_is_not_found() -> None:
    """A buffer of all gradients, and names of kept tensors, are state that the Session knows."""
    model = nn.Linear(2, 1)
    flat = torch.zeros(3)
    weights, shown = list(model.parameters()), model.weight.data
    model.weight.grad, model.bias.grad = flat[:2].view(1, 2), flat[2:]
    for _, number in steps(kept=[model]):
        flat.zero_()
        flat.add_(number)
        shown.add_(1)
    assert weights
