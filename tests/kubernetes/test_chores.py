"""What an engine does in the cluster beside steering."""

from __future__ import annotations

import threading

import pytest

from rekindle.engines.kubernetes import chores
from rekindle.engines.kubernetes.chores import Chores
from rekindle.errors import JobError


def refuse() -> None:
    raise JobError("no")


def wait(gate: threading.Event) -> None:
    gate.wait(30)


def test_nobody_waits_for_it_and_the_order_stays() -> None:
    """In the end all is done."""
    done: list[int] = []
    gate = threading.Event()
    mine = Chores()
    with mine.open(print):

        def first() -> None:
            wait(gate)
            done.append(0)

        mine.do("the first", first)
        for number in (1, 2):
            mine.do("another", lambda number=number: done.append(number))
        assert done == []
        gate.set()
    assert done == [0, 1, 2]


def test_what_fails_is_told() -> None:
    """What comes after it is done all the same."""
    told: list[str] = []
    done: list[int] = []
    mine = Chores()
    with mine.open(told.append):
        mine.do("it is not done", refuse)
        mine.do("it is", lambda: done.append(1))
    assert (told, done) == (["it is not done: no"], [1])


def test_it_is_done_at_once_while_nobody_looks() -> None:
    """Before and after; whoever asks is told of a failure."""
    mine = Chores()
    with pytest.raises(JobError):
        mine.do("it is not done", refuse)
    with mine.open(print):
        pass
    with pytest.raises(JobError):
        mine.do("it is not done", refuse)


def test_an_end_that_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what it has given up."""
    monkeypatch.setattr(chores, "CLOSE_S", 0.1)
    told: list[str] = []
    gate = threading.Event()
    mine = Chores()
    with mine.open(told.append):
        mine.do("node 1 is not replaced", lambda: wait(gate))
    gate.set()
    assert told == ["given up after 0.1 s, with all that came later: node 1 is not replaced"]
