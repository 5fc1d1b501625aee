"""Approval by a user: the form in Prefect, the shell, a timeout, and a killed flow."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import acts
import pytest
from prefect.client.schemas.responses import SetStateStatus
from prefect_side import Served, until

from rekindle.engines.client import JobClient
from rekindle.protocol.agent import Approval
from rekindle.recovery.journal.journal import Answered, Ended, RanksStarted

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).with_name("scripts") / "gated.py"
AWAITING = "AwaitingApproval"


class Asked:
    """A job of two nodes whose restarts need a user's approval."""

    def __init__(self, served: Served, gate: Path, **policy: Any) -> None:
        self.gate = gate
        self.run = served.start(
            script=str(SCRIPT),
            arguments=[str(gate), "exit"],
            nodes=2,
            policy={"approve": ["restart"], "max_in_row": 9, **policy},
        )
        self._started = 0

    def until_started(self) -> None:
        """Wait for the next start of both ranks."""
        self._started += 2
        self.run.until(lambda: self.run.count(RanksStarted) == self._started, "the ranks run")

    def ask(self) -> None:
        """Kill a rank; wait for the form."""
        self.run.process()  # it steers the job
        os.kill(self.run.status().ranks[1].pid, signal.SIGKILL)
        self.run.until(lambda: self.run.state().is_paused(), "the flow run is paused")

    def resume(self, answer: str, name: str = "") -> None:
        """Submit the form."""
        given = {"answer": answer, **({"name": name} if name else {})}
        self.run.client.resume_flow_run(self.run.id, run_input=given)

    def answers(self) -> list[tuple[bool, str]]:
        """Return each answer of the job: whether it grants, and its author."""
        return [(e.granted, e.by) for e in self.run.history() if isinstance(e, Answered)]


def the_form_is_validated_and_its_answer_carried_out(asked: Asked) -> None:
    """Prefect refuses a form without a valid answer; after a valid one the strategy runs."""
    run = asked.run
    asked.until_started()
    asked.ask()
    paused = run.state()
    assert paused.name == AWAITING
    question = "may the job use the strategy restart? Rank 1 was ended by signal 9"
    assert question in (paused.message or "")
    run.until(lambda: question in run.logs(), "the log has the question")
    for wrong in ({}, {"answer": "perhaps"}, {"answer": "approve", "nmae": "Ada"}):
        result = run.client.resume_flow_run(run.id, run_input=wrong)
        assert result.status is SetStateStatus.REJECT, wrong
    assert run.state().name == AWAITING
    assert run.count(RanksStarted) == 2
    asked.resume("approve", "Ada")
    asked.until_started()
    assert asked.answers() == [(True, "Ada")]
    steps = {"detected", "decided", "awaiting-approval", "answered"}
    wanted = {f"rekindle.incident.{step}" for step in steps}
    run.until(lambda: wanted <= {name for name, _ in run.events()}, "Prefect has the events")
    run.until_state("Restarting")
    shown = run.states()
    assert [*dict.fromkeys(shown[shown.index(AWAITING) :])] == [AWAITING, "Running", "Restarting"]


def an_answer_from_the_shell_resumes_the_flow_run(asked: Asked) -> None:
    """An answer from the shell also ends the pause."""
    run = asked.run
    asked.ask()
    endpoint = run.until(run.directory.endpoint, "the job has a coordinator")
    answer = Approval(incident=2, granted=True, by="Grace")
    JobClient(endpoint, run.directory.secret()).approve(answer)
    asked.until_started()
    assert asked.answers()[1:] == [(True, "Grace")]
    run.until(lambda: run.state().is_running(), "the flow run is resumed")


def an_answer_that_a_killed_flow_process_did_not_fetch(asked: Asked) -> None:
    """A rerun uses an answer that the killed process did not read."""
    asked.ask()
    flow = asked.run.process()
    flow.suspend()
    asked.resume("approve", "Alan")
    assert len(asked.answers()) == 2
    flow.kill()
    asked.run.until_rerun(flow.pid)
    asked.until_started()
    assert asked.answers()[2:] == [(True, "Alan")]


def cancelling_instead_of_answering_stops_the_job(asked: Asked) -> None:
    """The cancellation of a paused flow run stops its job."""
    asked.ask()
    asked.run.cancel()
    assert asked.run.until_final().name == "Cancelled"
    asked.run.until(lambda: asked.run.count(Ended) == 1, "the job has ended")
    assert len(asked.answers()) == 3


def a_refusal_ends_the_job_with_its_reason(asked: Asked) -> None:
    """After a refusal the job does not restart; the flow run fails with that reason."""
    asked.run.retry()
    asked.until_started()
    asked.ask()
    asked.resume("refuse")
    state = asked.run.until_state("Failed")
    assert "restart was not approved by a person, in Prefect" in (state.message or "")


def an_approved_restart_leads_to_success(asked: Asked) -> None:
    """The ranks that an approved restart has started complete the job."""
    asked.run.retry()
    asked.until_started()
    asked.ask()
    asked.resume("approve")
    asked.until_started()
    asked.gate.touch()
    asked.run.until_state("Completed")


ACTS = [
    the_form_is_validated_and_its_answer_carried_out,
    an_answer_from_the_shell_resumes_the_flow_run,
    an_answer_that_a_killed_flow_process_did_not_fetch,
    cancelling_instead_of_answering_stops_the_job,
    a_refusal_ends_the_job_with_its_reason,
    an_approved_restart_leads_to_success,
]


@pytest.fixture(scope="module")
def played(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run one flow run, which asks a user five times in three attempts."""
    asked = Asked(served, tmp_path_factory.mktemp("asked") / "gate", max_restarts=9)
    yield acts.Played(ACTS, asked)
    asked.gate.touch()


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_approval(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)


def test_no_answer_in_time(served: Served, tmp_path: Path) -> None:
    """Without an answer in time the flow run fails with that reason, as after a refusal.

    A policy that names only the strategies to approve allows restarts.
    """
    asked = Asked(served, tmp_path / "gate", approval_timeout_s=4)
    asked.until_started()
    asked.run.process()
    os.kill(asked.run.status().ranks[1].pid, signal.SIGKILL)
    until(lambda: AWAITING in asked.run.states(), "the flow run is paused")
    state: Any = asked.run.until_final()
    assert state.name == "Failed"
    assert "restart was not approved by anybody within 4 s" in (state.message or "")
