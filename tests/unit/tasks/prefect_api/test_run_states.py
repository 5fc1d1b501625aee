"""The meaning of a flow run's state for its job, and writes that keep the state of a person."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import State
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

from rekindle.errors import LeaseHeldError
from rekindle.tasks.prefect_api.run_states import (
    RUNNER_SHUTS_DOWN,
    demand,
    is_refused,
    is_writable,
    replace,
)


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        (None, "the deletion"),
        (Suspended(), "the suspension"),
        (Cancelling(), "the cancellation"),
        (Cancelled(), "the cancellation"),
        (Cancelled(message=RUNNER_SHUTS_DOWN), ""),
        (Cancelling(message=RUNNER_SHUTS_DOWN), ""),
        (Failed(), "the state Failed"),
        (Failed(name="TimedOut"), "the time limit"),
        (Completed(), "the state Completed"),
        (Crashed(), ""),
        (Paused(name="AwaitingApproval"), ""),
        (Running(name="Recovering"), ""),
        (Pending(), ""),
        (Scheduled(name="Rescheduling"), ""),
    ],
)
def test_what_a_state_demands(state: State[Any] | None, wanted: str) -> None:
    """A state in which the run has ended for good, or is suspended, stops the job."""
    assert demand(state) == wanted


@pytest.mark.parametrize(
    ("state", "writable"),
    [
        (Running(), True),
        (Running(name="Recovering"), True),
        (Paused(name="AwaitingApproval"), True),
        (Suspended(), False),
        (Cancelling(), False),
        (Cancelled(), False),
        (Failed(), False),
        (Completed(), False),
        (Crashed(), False),
        (Scheduled(), False),
        (Pending(), False),
    ],
)
def test_which_states_the_process_of_a_run_replaces(state: State[Any], writable: bool) -> None:
    """It replaces no final state, no suspension, and no order to run again."""
    assert is_writable(state) == writable


def test_a_refused_run_has_no_say_about_the_job() -> None:
    """A run that failed because another run steers the job does not stop it."""
    text = f"Flow run encountered an exception: {LeaseHeldError.__name__}: flow run owl steers it"
    assert is_refused(Failed(message=text))
    assert not is_refused(Failed(message="no use"))
    assert not is_refused(Crashed(message=text))


def write(server: SimulatedFlowRun) -> str:
    client: Any = server
    return replace(client, uuid4(), Running(name="Recovering"))


def test_a_state_is_written_over_a_running_one() -> None:
    """The usual case: there is no other writer."""
    server = SimulatedFlowRun(Pending(), Running())
    assert write(server) == ""
    assert server.names() == ["Pending", "Running", "Recovering"]


def test_no_state_is_written_over_a_decided_one() -> None:
    """The state of a run that has ended, or is suspended, stays."""
    for decided in (Failed(), Cancelled(), Suspended()):
        server = SimulatedFlowRun(Running(), decided)
        assert write(server) == f"the run has the state {decided.name}"
        assert server.names() == ["Running", decided.name]


def test_a_state_that_comes_between_read_and_write_is_set_again() -> None:
    """Prefect has no conditional write. A person's state, with its message, is the last one."""
    server = SimulatedFlowRun(Running(), meanwhile=(Failed(message="no use"),))
    assert write(server) == "the run has the state Failed"
    assert server.names() == ["Running", "Failed", "Recovering", "Failed"]
    assert server.states[-1].message == "no use"


def test_another_name_of_a_running_state_may_be_lost() -> None:
    """Between two names of a living run the later one counts."""
    server = SimulatedFlowRun(Running(), meanwhile=(Running(name="Hung"),))
    assert write(server) == ""
    assert server.names()[-1] == "Recovering"
