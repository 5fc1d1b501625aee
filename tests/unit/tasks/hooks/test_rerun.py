"""The number of ends of a flow run since a person last started it, from its states alone."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import (
    Cancelled,
    Completed,
    Crashed,
    Failed,
    Paused,
    Pending,
    Running,
    Scheduled,
)

from rekindle.tasks.hooks.rerun import ends_of

BEGUN: list[State[Any]] = [Scheduled(), Pending(), Running()]
AGAIN: list[State[Any]] = [Scheduled(name="Rescheduling"), Pending(), Running()]
BY_HAND: list[State[Any]] = [Scheduled(name="AwaitingRetry"), Pending(), Running()]
RETRIED: list[State[Any]] = [Scheduled(name="AwaitingRetry"), Running(name="Retrying")]
NAMED: list[State[Any]] = [Running(name="Recovering"), Paused(name="AwaitingApproval"), Running()]
ENDS: list[State[Any]] = [Failed(message="one")]
DIES: list[State[Any]] = [Crashed(message="two")]


@pytest.mark.parametrize(
    ("states", "messages"),
    [
        ([*BEGUN, *ENDS], ["one"]),
        ([*BEGUN, *ENDS, *AGAIN, *DIES], ["one", "two"]),
        ([*BEGUN, *NAMED, *ENDS, *AGAIN, *NAMED, *DIES], ["one", "two"]),
        ([*BEGUN, *RETRIED, *ENDS, *AGAIN, *DIES], ["one", "two"]),  # a retry in its process
        ([*BEGUN, *ENDS, *DIES], ["two"]),  # two processes reported the same end
        ([*BEGUN, *ENDS, *NAMED, *AGAIN, *DIES], ["one", "two"]),  # the process was alive
        ([*BEGUN, *ENDS, *AGAIN, *ENDS, *BY_HAND, *DIES], ["two"]),
        ([*BEGUN, *ENDS, *BY_HAND, *DIES, *AGAIN, *ENDS], ["two", "one"]),
        ([*BEGUN, *ENDS, *AGAIN, Cancelled(), *BY_HAND, *DIES], ["two"]),
        ([*BEGUN, *ENDS, *AGAIN, Completed(), *BY_HAND, *DIES], ["two"]),
    ],
)
def test_ends_are_counted_since_a_person_began_the_run(
    states: list[State[Any]], messages: list[str]
) -> None:
    """Ends before automatic reschedules add up; any other start resets the count."""
    ends = ends_of(states)
    assert [end.message for end in ends] == messages
    assert [end.crashed for end in ends] == [message == "two" for message in messages]
