"""All that a block changes returns before the block begins again, or the block is refused."""

from __future__ import annotations

import enum
import functools
import random
import sys
from array import array as array_of
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rekindle.errors import SessionError
from rekindle.training.torch.state.script_names import LONG, SMALL_BYTES, reads_later
from rekindle.training.torch.state.script_values import Blocks

pytestmark = pytest.mark.usefixtures("only_this_module")


class Meter:
    """An object with a list in it."""

    made = 0

    def __init__(self) -> None:
        self.total, self.seen = 0.0, [0]


@dataclass(slots=True)
class Slotted:
    """An object without a dict."""

    total: int = 0
    by_name: dict[str, list[int]] = field(default_factory=dict)


class Kind(enum.Enum):
    """A class of values that nobody changes."""

    ONE = 1


class Layer(nn.Module):
    """A module with a value that no state_dict() has."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


losses: list[float] = []
array = np.zeros(3)


def _change_globals() -> None:
    global losses
    losses.append(1.0)
    losses = [*losses, 2.0]
    array[0] += 1
    Meter.made += 1


@pytest.fixture
def changed() -> Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]]:
    """Return a function that returns a value before a change, and after its restoration."""

    def run(show: Callable[[], Any], change: Callable[[], Any]) -> tuple[Any, Any]:
        blocks = Blocks()
        before = repr(show())
        blocks.keep(sys._getframe(1))
        change()
        assert repr(show()) != before
        blocks.check()
        blocks.restore()
        return before, repr(show())

    return run


Changed = Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]]


def test_the_contents_of_containers_return(changed: Changed) -> None:
    """At any depth, with the order of their keys, and as the same objects."""
    deep: dict[str, Any] = {"a": [{"b": ([1], {2}, deque([3], maxlen=2))}]}
    counts, ordered, default = Counter("aab"), OrderedDict(x=1, y=2), defaultdict(list, k=[1])
    data, numbers, wrapped = bytearray(b"abc"), array_of("l", [1]), UserDict(a=[1])
    part = functools.partial(sum, [1])

    def remember(number: int, *, seen: list[int] = [], last: dict[str, int] = {}) -> Any:  # noqa: B006
        seen.append(number)
        last["n"] = number
        return len(seen)

    def change() -> None:
        numbers[0] += 1
        numbers.append(2)
        wrapped["a"].append(2)
        wrapped["b"] = 1
        part.args[0].append(2)
        remember(1)
        first, second, third = deep["a"][0]["b"]
        first.append(5)
        second.add(6)
        third.append(7)
        third.append(8)
        deep["new"] = 1
        counts["a"] += 1
        counts["c"] += 1
        ordered.move_to_end("x")
        del ordered["y"]
        default["k"].append(2)
        default["n"].append(2)
        data[0] = 0

    def show() -> Any:
        return deep, counts, ordered, default, data, numbers, wrapped, part, remember.__kwdefaults__

    before, after = changed(show, change)
    assert after == before


def test_the_names_of_objects_classes_and_closures_return(changed: Changed) -> None:
    """Also those of dataclasses with slots, of modules, and of the script's own torch modules."""
    meter, slotted, layer = Meter(), Slotted(), Layer()
    objects = [{"meter": Meter()}]
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    def change() -> None:
        meter.total += 1
        meter.seen.append(1)
        vars(meter)["late"] = 5
        slotted.total += 1
        slotted.by_name.setdefault("x", []).append(1)
        layer.calls += 1
        objects[0]["meter"].seen[0] += 1
        count()
        _change_globals()

    def show() -> Any:
        return (
            *(vars(meter), slotted, layer.calls, vars(objects[0]["meter"]), calls),
            *(losses, array.tolist(), Meter.made, Kind.ONE),
        )

    before, after = changed(show, change)
    assert after == before


def test_arrays_tensors_and_generators_return(changed: Changed) -> None:
    """Small ones in place; a tensor with a graph returns with its numbers."""
    bins, tensor = np.zeros((2, 2)), torch.zeros(2)
    weight = torch.ones(1, requires_grad=True)
    by_name = {"sum": weight * 2}
    generators = torch.Generator(), np.random.default_rng(1), random.Random(1)

    def change() -> None:
        bins[0, 1] += 1
        tensor.add_(1)
        by_name["sum"] = by_name["sum"].detach() + 1
        torch.rand(1, generator=generators[0])
        generators[1].random()
        generators[2].random()

    def show() -> Any:
        states = generators[1].bit_generator.state, generators[2].getstate()
        sums = by_name["sum"].item()
        return bins, tensor, sums, generators[0].get_state().tolist(), states

    before, after = changed(show, change)
    assert after == before


@pytest.mark.parametrize("kind", [list, dict, set, deque, bytearray])
def test_a_long_container_returns(kind: Any, changed: Changed) -> None:
    """It has a copy in the first blocks, which show whether blocks change it."""
    made = (
        dict.fromkeys(range(LONG + 5)) if kind is dict else kind(i % 256 for i in range(LONG * 2))
    )

    def change() -> None:
        if isinstance(made, dict | bytearray):
            made[3] = 77
        elif isinstance(made, list):
            made[0] = "x"
            made.append("y")
        elif isinstance(made, set):
            made.add(-1)
        else:
            made.append(-1)

    before, after = changed(lambda: made, change)
    assert after == before


def test_a_long_list_that_grows_later_returns() -> None:
    """Of one that blocks do not change otherwise, the length is enough."""
    history = list(range(LONG + 1))
    blocks = Blocks()
    for _ in range(11):  # no block of a power of two
        blocks.keep(sys._getframe())
        history.append(1)
        blocks.check()
    length = len(history)
    blocks.keep(sys._getframe())
    history.append(1)
    blocks.restore()
    assert len(history) == length


def test_a_generator_that_another_one_advances_is_refused() -> None:
    """Its own place stays the same while `yield from` gives the values of the inner one."""

    def inner() -> Iterator[int]:
        yield from range(9)

    def outer() -> Iterator[int]:
        yield from inner()

    batches = outer()
    next(batches)
    blocks = Blocks()
    blocks.keep(sys._getframe())
    next(batches)
    with pytest.raises(SessionError, match="the block advances batches"):
        blocks.check()


def _forever() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


@pytest.mark.parametrize(
    ("thing", "change", "text"),
    [
        (torch.zeros(SMALL_BYTES), lambda t: t.add_(1), "changes thing in place"),
        (np.zeros(SMALL_BYTES), lambda a: a.fill(1), "changes thing in place"),
        (iter([1, 2, 3]), next, "advances thing"),
        (_forever(), next, "advances thing"),
        (zip([1, 2], [3, 4], strict=True), next, "advances thing"),
    ],
    ids=["tensor", "array", "iterator", "generator", "zip"],
)
def test_a_block_that_could_not_begin_again_is_refused(
    thing: Any, change: Callable[[Any], Any], text: str
) -> None:
    """At its end, before it counts. What may be lost is not searched."""
    blocks, ignoring = Blocks(), Blocks(ignore=["thing"])
    for each in (blocks, ignoring):
        each.keep(sys._getframe())
    change(thing)
    with pytest.raises(SessionError, match=text):
        blocks.check()
    with pytest.raises(SessionError, match=text):
        blocks.restore()
    ignoring.check()
    ignoring.restore()


def test_what_the_session_keeps_is_left_alone() -> None:
    """Objects of `extra` have a copy of their own; other threads change a thread."""
    kept = Meter()
    blocks = Blocks([kept])
    blocks.keep(sys._getframe())
    kept.total = 5
    blocks.restore()
    assert kept.total == 5


def test_the_uses_of_variables_after_a_place_are_known() -> None:
    """A large output of the block before need not be kept if the block sets it first."""

    def places(found: list[Any]) -> Iterator[int]:
        found.append(reads_later(sys._getframe(1)))
        yield 1

    def script(hidden: int, best: int) -> list[Any]:
        found: list[Any] = []
        total = output = 0
        for _ in places(found):
            total = hidden + 1
            output = total
            best = max(best, output)
        return [*found, best]

    [later, _] = script(1, 2)
    assert later & {"hidden", "best", "total", "output", "found"} == {"hidden", "best", "found"}


class Token:
    """An object of a script."""

    def __init__(self, number: int) -> None:
        self.seen = [number]


def test_too_many_objects_are_refused() -> None:
    """A search that ended early would leave changes without a copy."""
    vocabulary = {row: [Token(row) for _ in range(LONG)] for row in range(6)}
    with pytest.raises(SessionError, match=r"more than 5000 objects .* of them in vocabulary, "):
        Blocks().keep(sys._getframe())
    Blocks(ignore=["vocabulary"]).keep(sys._getframe())
    assert len(vocabulary) == 6
