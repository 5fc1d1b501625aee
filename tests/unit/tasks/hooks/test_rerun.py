"""Which flow runs begin again, and the number of their ends since a person last started them."""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import (
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Paused,
    Pending,
    Running,
    Scheduled,
    Suspended,
)
from simulated.flow_run import SimulatedFlowRun

from rekindle.tasks.hooks import rerun
from rekindle.tasks.hooks.cancellation import OF_FLOW_PROCESS
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


@pytest.mark.parametrize(
    ("states", "added"),
    [
        ([*BEGUN, Crashed()], ["Rescheduling"]),
        ([*BEGUN, Suspended(), Crashed()], ["Suspended"]),
        ([*BEGUN, Cancelled(message="Runner is shutting down."), Crashed()], ["Rescheduling"]),
        ([*BEGUN, Cancelling(), Crashed()], []),
        ([*BEGUN, Failed(name="TimedOut")], []),
    ],
)
def test_which_runs_begin_again(
    states: list[State[Any]], added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that a person has suspended, or that reached its time limit, does not run again.

    If the process of a suspended run crashes, the run is suspended again.
    """
    server = SimulatedFlowRun(*states)
    monkeypatch.setattr(rerun, "get_client", lambda sync_client: server)
    run = FlowRun.model_validate({"flow_id": uuid4(), "deployment_id": uuid4()})
    again = rerun.run_again(OF_FLOW_PROCESS, run, server.states[-1], logging.getLogger())
    assert server.names()[len(states) :] == added
    assert again == (added == ["Rescheduling"])
