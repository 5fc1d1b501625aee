"""Processes that a signal has stopped: how often the agent must see that."""

from __future__ import annotations

from rekindle.agent.stopped_processes import StopCounter


def test_a_process_counts_as_stopped_after_consecutive_looks() -> None:
    """A process that runs at one look begins at zero again. A process that a tracer holds runs."""
    counter = StopCounter(3)
    for _ in range(2):
        assert counter.look({1: "T", 2: "T", 3: "t"}) == []
    assert counter.look({1: "T", 2: "S", 3: "t"}) == [1]
    for _ in range(2):
        assert counter.look({1: "T", 2: "T", 3: "t"}) == []
    assert counter.look({1: "T", 2: "T", 3: "t"}) == [1, 2]


def test_a_process_that_ends_is_forgotten() -> None:
    """The kernel may give its number to another process."""
    counter = StopCounter(2)
    counter.look({1: "T"})
    counter.look({})
    assert counter.look({1: "T"}) == []
