"""Variables of a loop that no other process could get are refused with the remedy."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loop_of_batches import BATCHES, Loop, Script

from rekindle.errors import SessionError
from rekindle.training.torch.state.script_variables import Variables

pytestmark = pytest.mark.usefixtures("only_this_module")


class Meter:
    """An object of a script."""

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, value: float) -> None:
        """Add a value."""
        self.total += value


def _large(loop: Loop) -> None:
    state = torch.zeros(100_000)
    for number in loop.batches():
        state = state * 0.9 + number


def _large_in_place(loop: Loop) -> None:
    state = {"running": np.zeros(100_000)}
    for number in loop.batches():
        state["running"][number] += 1


def _iterator(loop: Loop) -> None:
    other = iter([[each] for each in range(100)])
    for _ in loop.batches():
        next(other)


def _own_generator(loop: Loop) -> None:
    def forever() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    other = forever()
    for _ in loop.batches():
        next(other)


def _other_object(loop: Loop) -> None:
    best = None
    for _ in loop.batches():
        best = torch.nn.Linear(1, 1)
    assert best is not None


def _local_class(loop: Loop) -> None:
    class Entry:
        def __init__(self, number: int) -> None:
            self.number = number

    entries = []
    for number in loop.batches():
        entries.append(Entry(number))


def _set_of_objects(loop: Loop) -> None:
    meters = {Meter()}
    for number in loop.batches():
        for each in meters:
            each.total += number


class Counted(torch.nn.Module):
    """A module outside of the model, with an attribute that no state_dict() has."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


def _module(loop: Loop) -> None:
    criterion = Counted()
    for number in loop.batches():
        criterion.calls += number


def _method(loop: Loop) -> None:
    add = Meter().update
    for number in loop.batches():
        add(number)


def _partial(loop: Loop) -> None:
    add = functools.partial(Meter.update, Meter())
    for number in loop.batches():
        add(number)


def _chain(loop: Loop) -> None:
    chain = None
    for _ in range(150):
        chain = SimpleNamespace(inner=chain, total=0)
    for number in loop.batches():
        chain.total += number


def _long_chain(loop: Loop) -> None:
    chain = None
    for _ in range(100_000):
        chain = (chain,)
    for _ in loop.batches():
        assert chain is not None


def _attribute(loop: Loop) -> None:
    trainer = SimpleNamespace(best=None)
    for _ in loop.batches():
        trainer.best = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (_large, "state"),
        (_large_in_place, "state.running"),
        (_iterator, "other"),
        (_own_generator, "other"),
        (_other_object, "best"),
        (_attribute, "trainer.best"),
        (_local_class, "entries.0"),
        (_set_of_objects, "meters"),
        (_module, "criterion"),
        (_method, "add"),
        (_partial, "add"),
        (_chain, "chain"),
        (_long_chain, "chain"),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_variable_that_no_other_process_could_get_is_refused(script: Script, name: str) -> None:
    """The first batch that changes it shows it, and the text has the remedy."""
    with pytest.raises(SessionError, match=rf"^{name} changes .*extra=.*ignore="):
        script(Loop(None, 0, 2))
    script(Loop(None, 0, 2, ignore=[name.partition(".")[0]]))


def test_a_text_that_no_message_can_hold_is_refused() -> None:
    """Such a text can be a file's name."""
    state = {"name": "", "count": 0}
    loop = Loop(None, 0, BATCHES)
    for number in loop.batches():
        state["name"] = f"{number}\udcff"
    with pytest.raises(SessionError, match=r"^variables have '\d\\udcff', which UTF-8"):
        loop.note()


def test_a_run_that_changes_variables_is_refused() -> None:
    """A new process gets only the result of the function."""
    history, best = [0.5], float("nan")
    variables, ignoring = Variables((), ["before"]), Variables((), ["before", "history"])
    before = variables.prints(sys._getframe())
    variables.check_run(before, sys._getframe())
    before = ignoring.prints(sys._getframe())
    history.append(best)
    ignoring.check_run(before, sys._getframe())
    before = variables.prints(sys._getframe())
    history.append(best)
    with pytest.raises(SessionError, match=r"changes history, .*return the values"):
        variables.check_run(before, sys._getframe())
    assert len(history) == 3
