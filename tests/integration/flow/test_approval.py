"""Approval by a person: the form in Prefect, the shell, nobody in time, and a flow that dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.responses import SetStateStatus
from prefect_side import FlowRun, Served, until

from rekindle.engines.client import JobClient
from rekindle.recovery.journal import Answered, Ended, RanksStarted
from rekindle.runtime.protocol import Approval

pytestmark = pytest.mark.timeout(400)

SCRIPT = Path(__file__).with_name("scripts") / "gated.py"
AWAITING = "AwaitingApproval"


def start(served: Served, gate: Path, **policy: Any) -> FlowRun:
    """Start a job whose restarts a person must approve, and kill a rank; wait for the form."""
    run = served.start(
        script=str(SCRIPT),
        arguments=[str(gate), "exit"],
        nodes=2,
        policy={"approve": ["restart"], **policy},
    )
    until(lambda: run.count(RanksStarted) == 2, "the ranks run")
    run.process()  # it steers the job
    os.kill(run.status().ranks[1].pid, signal.SIGKILL)
    return run


def answers(run: FlowRun) -> list[tuple[bool, str]]:
    """What was answered, and by whom."""
    return [(e.granted, e.by) for e in run.history() if isinstance(e, Answered)]


def test_the_form_is_validated_and_its_answer_carried_out(served: Served, tmp_path: Path) -> None:
    """A resume without an answer is refused; with one, the strategy is carried out."""
    run = start(served, tmp_path / "gate")
    paused = until(lambda: run.state().is_paused() and run.state(), "the flow run is paused")
    assert paused.name == AWAITING
    assert "restart: rank 1 was ended by signal 9" in (paused.message or "")
    for wrong in ({}, {"answer": "perhaps"}, {"answer": "approve", "nmae": "Ada"}):
        result = run.client.resume_flow_run(run.id, run_input=wrong)
        assert result.status is SetStateStatus.REJECT, wrong
    assert run.state().name == AWAITING
    assert run.count(RanksStarted) == 2
    run.client.resume_flow_run(run.id, run_input={"answer": "approve", "name": "Ada"})
    until(lambda: run.count(RanksStarted) == 4, "all ranks are started anew")
    assert answers(run) == [(True, "Ada")]
    (tmp_path / "gate").touch()
    assert run.until_final().name == "Completed"
    names = run.states()
    named = names[names.index(AWAITING) :]
    assert [*dict.fromkeys(named)] == [AWAITING, "Running", "Restarting", "Completed"]
    steps = {"detected", "decided", "awaiting-approval", "answered"}
    told = {f"rekindle.incident.{step}" for step in steps}
    until(lambda: told <= {name for name, _ in run.events()}, "Prefect has the events")


def test_a_refusal_ends_the_job_with_its_reason(served: Served, tmp_path: Path) -> None:
    """What a person refuses is not done; the flow run fails, and says who."""
    run = start(served, tmp_path / "gate")
    until(lambda: run.state().is_paused(), "the flow run is paused")
    run.client.resume_flow_run(run.id, run_input={"answer": "refuse"})
    state = run.until_final()
    assert state.name == "Failed"
    assert "restart was not approved by a person, in Prefect" in (state.message or "")


def test_an_answer_from_the_shell_resumes_the_flow_run(served: Served, tmp_path: Path) -> None:
    """Whoever answers elsewhere ends the pause as well."""
    run = start(served, tmp_path / "gate")
    until(lambda: run.state().is_paused(), "the flow run is paused")
    endpoint = until(run.directory.endpoint, "the job has a coordinator")
    answer = Approval(incident=1, granted=True, by="Grace")
    JobClient(endpoint, run.directory.secret()).approve(answer)
    until(lambda: run.state().name == "Running", "the flow run is resumed")
    assert answers(run) == [(True, "Grace")]
    (tmp_path / "gate").touch()
    assert run.until_final().name == "Completed"


def test_nobody_answers_in_time(served: Served, tmp_path: Path) -> None:
    """After its time the job ends as if refused, and the flow run fails with that reason."""
    run = start(served, tmp_path / "gate", approval_timeout_s=4)
    until(lambda: AWAITING in run.states(), "the flow run is paused")
    state = run.until_final()
    assert state.name == "Failed"
    assert "restart was not approved by anybody within 4 s" in (state.message or "")


def test_an_answer_that_a_killed_flow_process_did_not_fetch(served: Served, tmp_path: Path) -> None:
    """A rerun finds the answer that was given to the process before it."""
    run = start(served, tmp_path / "gate")
    until(lambda: run.state().is_paused(), "the flow run is paused")
    flow = run.process()
    flow.suspend()
    run.client.resume_flow_run(run.id, run_input={"answer": "approve", "name": "Ada"})
    assert not answers(run)
    flow.kill()
    run.until_rerun(flow.pid)
    until(lambda: answers(run) == [(True, "Ada")], "the answer has arrived")
    (tmp_path / "gate").touch()
    until(lambda: run.state().name == "Completed", "the job has succeeded")


def test_cancelling_instead_of_answering_stops_the_job(served: Served, tmp_path: Path) -> None:
    """A paused flow run that is cancelled leaves no job behind."""
    run = start(served, tmp_path / "gate")
    until(lambda: run.state().is_paused(), "the flow run is paused")
    run.cancel()
    assert run.until_final().name == "Cancelled"
    until(lambda: run.count(Ended) == 1, "the job has ended")
    assert not answers(run)
