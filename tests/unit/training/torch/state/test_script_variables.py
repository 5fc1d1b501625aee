"""Variables of a loop that change go to a new process, or the script is refused with the remedy."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from loop_of_batches import BATCHES, Loop, Script

from rekindle.errors import SessionError
from rekindle.training.torch.state.script_variables import Variables

pytestmark = pytest.mark.usefixtures("only_this_module")


def _in_two_processes(script: Script, at: int) -> tuple[Any, Any]:
    """Return the values of an undisturbed run, and those of a run whose process ends at a batch."""
    expected = script(Loop(None, 0, BATCHES))
    former = Loop(None, 0, at)
    script(former)
    return expected, script(Loop(former.note(), at, BATCHES))


class Meter:
    """An object of a script."""

    def __init__(self) -> None:
        self.total, self.recent = 0.0, deque[float](maxlen=2)

    def update(self, value: float) -> None:
        """Add a value."""
        self.total += value
        self.recent.append(value)


class Slotted:
    """An object without a dict."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


class Trainer:
    """An object with others in it, and a variable of its class."""

    batches = 0

    def __init__(self) -> None:
        self.meters = defaultdict(Meter)
        self.model = torch.nn.Linear(1, 1)
        self.nested = {"a": {"b": {"c": [0]}}}


def _numbers(loop: Loop) -> Any:
    total, best, name, count = 0.0, None, "", 0
    for number in loop.batches():
        total += number / 3
        best = number if best is None else max(best, number)
        name += str(number)
        count += 10**18 * 5
    return total, best, name, count


def _numpy_values(loop: Loop) -> Any:
    worst, array = np.float64(0), np.zeros(3)
    for number in loop.batches():
        worst = max(worst, np.float64(number))
        array[number % 3] += number
    return type(worst).__name__, float(worst), array.tolist()


def _containers(loop: Loop) -> Any:
    history: list[Any] = []
    recent: deque[int] = deque(maxlen=2)
    counts: Counter[int] = Counter()
    seen: set[int] = set()
    ordered: OrderedDict[int, int] = OrderedDict()
    alias = history
    for number in loop.batches():
        history.append([number, (number, [float(number)])])
        recent.append(number)
        counts[number % 2] += 1
        seen.add(number)
        ordered[number] = -number
    return alias, list(recent), recent.maxlen, counts, seen, list(ordered.items())


def _large_numbers(loop: Loop) -> Any:
    state = {"hash": [1 << 80], "count": 0}
    for number in loop.batches():
        state["hash"][0] += number
        state["count"] += 1
    return state


def _long_list(loop: Loop) -> Any:
    history = [0.5] * 2_000
    for number in loop.batches():
        history.append(float(number))
        history[number] = -1.0
    return history


def _objects(loop: Loop) -> Any:
    meter, slotted, trainer = Meter(), Slotted(), Trainer()
    space = SimpleNamespace(last=-1)
    Trainer.batches = 0
    for number in loop.batches():
        meter.update(number)
        slotted.total += number
        trainer.meters["loss"].update(number)
        trainer.meters[f"of {number % 2}"].update(number)
        trainer.nested["a"]["b"]["c"].append(number)
        Trainer.batches += 1
        space.last = number
    meters = {name: (each.total, list(each.recent)) for name, each in trainer.meters.items()}
    kinds = {type(each).__name__ for each in trainer.meters.values()}
    return meter.total, slotted.total, meters, kinds, trainer.nested, Trainer.batches, space.last


def _tensors(loop: Loop) -> Any:
    total, moving = torch.zeros(2), torch.zeros(1)
    hidden: Any = None
    by_name: dict[str, Any] = {"sum": torch.zeros(1)}
    weight = torch.ones(1, requires_grad=True)
    for number in loop.batches():
        total += number
        moving = moving * 0.5 + number
        hidden = weight * number + (0 if hidden is None else hidden.detach())
        by_name["sum"] = by_name["sum"] + number
    return total.tolist(), moving.tolist(), hidden.item(), float(by_name["sum"])


def _closure(loop: Loop) -> Any:
    def counter() -> Callable[[], int]:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        return count

    count = counter()
    for _ in loop.batches():
        count()
    return count()


_LOSSES: list[float] = []
_state = {"last": -1}


def _globals(loop: Loop) -> Any:
    _LOSSES.clear()
    _state["last"] = -1
    for number in loop.batches():
        _LOSSES.append(number / 7)
        _state["last"] = number
    return list(_LOSSES), dict(_state)


def _generators(loop: Loop) -> Any:
    generator, rng = torch.Generator().manual_seed(1), np.random.default_rng(1)
    drawn: list[float] = []
    for _ in loop.batches():
        drawn.append(float(torch.rand(1, generator=generator)) + float(rng.random()))
    return drawn


class Callback:
    """An object that refers to the object which has it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.calls = 0


def _around(loop: Loop) -> Any:
    trainer = SimpleNamespace(steps=0)
    trainer.callbacks = [Callback(trainer)]
    trainer.callbacks.append(trainer.callbacks)
    for _ in loop.batches():
        trainer.steps += 1
        trainer.callbacks[0].calls += 1
    callback = trainer.callbacks[0]
    return trainer.steps, callback.calls, callback.trainer is trainer


_FIRST = torch.ones(1)


def _names_of_one_object(loop: Loop) -> Any:
    start = current = [0]
    zeros = moving = torch.zeros(2)
    value = _FIRST
    rows = [[0]] * 2
    entry: dict[str, float] = {}
    history: list[Any] = []
    meters = [Meter(), Meter(), Meter()]
    first = meters[0]
    for number in loop.batches():
        current = [current[0] + number]
        moving = moving * 0.5 + number
        value = value * 0.5 + number
        rows[0] = [*rows[0], number]
        if number % 2 == 0:
            entry = {"loss": 0.0}
            history.append(entry)
        entry["loss"] += number
        meters.append(meters.pop(0))
        meters[0].update(number)
    first.update(100)
    entry["loss"] += 0.5
    totals = [each.total for each in meters]
    tensors = [each.tolist() for each in (zeros, moving, value, _FIRST)]
    return start, current, tensors, rows, history, totals, first.total


def _default_of_an_epoch(loop: Loop) -> Any:
    sums: dict[int, Any] = {}
    for number in loop.batches():
        sums.setdefault(number // 2, defaultdict(float))["loss"] += number
    sums[0]["other"] += 1
    return sums


@dataclass
class Sums:
    """A class whose attributes are not all fields."""

    _total: float = 0.0
    by_kind: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = -1


class Private:
    """A class with a private slot."""

    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def add(self, number: int) -> int:
        """Add a number, and return the sum."""
        self.__count += number
        return self.__count


def _attributes(loop: Loop) -> Any:
    sums, several = Sums(), {"train": Sums(), "test": Sums()}
    private = Private()
    for number in loop.batches():
        sums._total += number
        sums.last = number
        several["train"]._total += 1
        several["test"].last = number
        private.add(number)
    several_sums = [(each._total, each.last) for each in several.values()]
    return sums._total, sums.last, several_sums, private.add(0)


def _none_first_and_last(loop: Loop) -> Any:
    phase: Any = "warmup"
    best: Any = None
    for number in loop.batches():
        phase = None if number else "started"
        best = number if best is None else best
    return phase, best


def _after_an_error(loop: Loop) -> Any:
    best, found = 0.0, []
    for number in loop.batches():
        try:
            if number % 2:
                raise ValueError
            best = float(number)
        except ValueError:
            pass
        found.append(best)
    return best, found


def _uncounted_changes(loop: Loop) -> Any:
    total, row = torch.zeros(2), torch.zeros(2)
    view = row.numpy()
    for number in loop.batches():
        total.data.add_(number)
        view[0] += number
    return total.tolist(), row.tolist()


def _wrapped(loop: Loop) -> Any:
    def numbered(batches: Iterator[int]) -> Iterator[tuple[int, int]]:
        count = 0
        for each in batches:
            yield count, each
            count += 2

    found: list[Any] = []
    pairs = numbered(loop.batches())
    for pair in pairs:
        found.append(pair)
    return found


def _made_again(loop: Loop) -> Any:
    bar = None
    for number in loop.batches():
        large = torch.full((100_000,), float(number))
        other = iter([number])
        bar = float(large[0]) + next(other)
    return bar


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    "script",
    [
        _numbers,
        _numpy_values,
        _containers,
        _large_numbers,
        _long_list,
        _objects,
        _tensors,
        _closure,
        _globals,
        _generators,
        _around,
        _names_of_one_object,
        _default_of_an_epoch,
        _attributes,
        _none_first_and_last,
        _after_an_error,
        _uncounted_changes,
        _wrapped,
        _made_again,
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_new_process_gets_the_variables(script: Script, at: int) -> None:
    """Its results are those of a run that nothing has disturbed."""
    expected, found = _in_two_processes(script, at)
    assert repr(found) == repr(expected)


def test_a_large_history_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line names it; above the limit it is refused."""
    module = "rekindle.training.torch.state.script_variables"
    monkeypatch.setattr(f"{module}.NOTICE_BYTES", 1_000)
    _long_list(Loop(None, 0, BATCHES))
    assert "of variables are copied before each block: history" in capfd.readouterr().err
    monkeypatch.setattr(f"{module}.LIMIT_BYTES", 1_000)
    with pytest.raises(SessionError, match=r"history.* change from block to block"):
        _long_list(Loop(None, 0, BATCHES))


def test_variables_that_change_are_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The line says what they cost."""
    loop = Loop(None, 0, BATCHES)
    loop.variables = Variables((), (), tells=True)
    _numbers(loop)
    told = capfd.readouterr().err
    text = "these variables change from block to block: best, count, name"
    assert told.count(text) == 1


def test_a_state_is_small() -> None:
    """It has only what changes."""
    loop = Loop(None, 0, 3)
    _numbers(loop)
    assert len(msgspec.msgpack.encode(loop.note())) < 1_000
