"""Work in the cluster that an engine does in the background."""

from __future__ import annotations

import threading

import pytest
from waiting import wait_set

from rekindle.engines.kubernetes.placement import pod_membership
from rekindle.engines.kubernetes.placement.pod_membership import RetryQueue
from rekindle.errors import JobError, UsageError


def refuse() -> None:
    raise JobError("no")


def test_nobody_waits_for_it_and_the_order_stays() -> None:
    """The queue does its work in order in another thread, and completes it before it closes."""
    done: list[int] = []
    gate = threading.Event()
    mine = RetryQueue()
    with mine.open(print):

        def first() -> None:
            wait_set(gate)
            done.append(0)

        mine.do("the first", first)
        for number in (1, 2):
            mine.do("another", lambda number=number: done.append(number))
        assert done == []
        gate.set()
    assert done == [0, 1, 2]


def test_what_fails_is_told() -> None:
    """The queue reports failed work, and continues with the next work."""
    messages: list[str] = []
    done: list[int] = []
    mine = RetryQueue()
    with mine.open(messages.append):
        mine.do("it is not done", refuse)
        mine.do("it is", lambda: done.append(1))
    assert (messages, done) == (["it is not done: no"], [1])


def test_what_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle queue tries failed work again, and reports the failure once."""
    monkeypatch.setattr(pod_membership, "AGAIN_S", 0.001)
    messages: list[str] = []
    tries: list[int] = []
    done = threading.Event()

    def fails_at_first() -> None:
        tries.append(0)
        if len(tries) < 3:
            raise OSError("the disk is full")
        done.set()

    mine = RetryQueue()
    with mine.open(messages.append):
        mine.do("it is not done", fails_at_first)
        wait_set(done)
    assert (len(tries), messages) == (3, ["it is not done: the disk is full"])


def test_what_fails_until_the_end_is_tried_once_more_then() -> None:
    tries: list[int] = []

    def fails() -> None:
        tries.append(0)
        refuse()

    mine = RetryQueue()
    with mine.open(print):
        mine.do("it is not done", fails)
    assert len(tries) == 2


def test_what_cannot_work_is_not_tried_again() -> None:
    messages: list[str] = []

    def cannot() -> None:
        raise UsageError("never")

    mine = RetryQueue()
    with mine.open(messages.append):
        mine.do("it is not done", cannot)
    assert messages == ["it is not done: never"]


def test_it_is_done_at_once_while_nobody_looks() -> None:
    """A closed queue does its work immediately, and raises the error of failed work."""
    mine = RetryQueue()
    with pytest.raises(JobError):
        mine.do("it is not done", refuse)
    with mine.open(print):
        pass
    with pytest.raises(JobError):
        mine.do("it is not done", refuse)


def test_an_end_that_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """If work does not end in time, close() reports it, and skips the later work.

    The work itself can read that it was abandoned.
    """
    monkeypatch.setattr(pod_membership, "CLOSE_S", 0.1)
    messages: list[str] = []
    states: list[bool] = []
    gate, begun, over = threading.Event(), threading.Event(), threading.Event()
    mine = RetryQueue()

    def stuck() -> None:
        states.append(mine.is_given_up)
        begun.set()
        wait_set(gate)
        states.append(mine.is_given_up)
        over.set()

    with mine.open(messages.append):
        mine.do("node 1 is not replaced", stuck)
        mine.do("nor is node 2", lambda: states.append(True))
        wait_set(begun)
    with mine.open(messages.append):  # the later queue has its own thread
        gate.set()
        wait_set(over)
    assert states == [False, True]
    assert messages == [
        "Rekindle abandoned this work after 0.1 s, and all later work: node 1 is not replaced"
    ]
