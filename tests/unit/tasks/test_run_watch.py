"""The watch of a flow run: which run's state ends the job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed, Failed, Running, Suspended

from rekindle.tasks.run_watch import Verdict, lineage, verdict_of

OWN, PARENT, TOP, OTHER, FLOW = (UUID(int=number) for number in range(1, 6))


class Runs:
    """Flow runs by id, each with a parent; `status` is that of the server's greeting."""

    def __init__(self, states: dict[UUID, State[Any] | None], status: int = 200) -> None:
        self.states, self.status = states, status

    def read_flow_run(self, run: UUID) -> FlowRun:
        if run not in self.states:
            raise ObjectNotFound(Exception())
        parents = {OWN: PARENT, PARENT: TOP}
        return FlowRun.model_validate(
            {
                "id": run,
                "flow_id": FLOW,
                "name": f"run-{run.int}",
                "parent_task_run_id": parents.get(run),
                "deployment_id": FLOW if run == TOP else None,
                "state": self.states[run],
            }
        )

    def read_task_run(self, task_run: UUID) -> SimpleNamespace:
        return SimpleNamespace(flow_run_id=task_run)  # the task run of a run has the id of its run

    def hello(self) -> httpx.Response:
        return httpx.Response(self.status, request=httpx.Request("GET", "http://127.0.0.1/hello"))


def found(states: dict[UUID, State[Any] | None], status: int = 200) -> Verdict | None:
    client: Any = Runs({OTHER: Running(), **states}, status)
    return verdict_of(client, [OWN, PARENT])


def test_the_lineage_ends_at_the_run_of_a_deployment() -> None:
    """A run of a deployment has its own process, so the end of its parent does not end its job."""
    client: Any = Runs({OWN: Running(), PARENT: Running(), TOP: Running()})
    assert lineage(client, client.read_flow_run(OWN)) == [OWN, PARENT, TOP]
    assert lineage(client, client.read_flow_run(TOP)) == [TOP]


@pytest.mark.parametrize(
    ("own", "parent", "by"),
    [
        (Running(), Running(), None),
        (Suspended(), Running(), "the suspension of flow run run-1"),
        (Running(), Suspended(), "the suspension of flow run run-2"),
        (Running(), Cancelled(), "the cancellation of flow run run-2"),
        (Running(), Failed(), "the state Failed of flow run run-2"),
        (Running(), Completed(), None),
        (Completed(), Running(), "the state Completed of flow run run-1"),
        (None, Running(), None),
    ],
)
def test_the_run_or_a_parent_ends_the_job(
    own: State[Any] | None, parent: State[Any], by: str | None
) -> None:
    """A parent ends the job as the run does, except that it may complete without waiting."""
    verdict = found({OWN: own, PARENT: parent})
    assert (verdict.by.partition(" (")[0] if verdict else None) == by


def test_a_deleted_run_ends_the_job_if_the_server_answers() -> None:
    """A proxy without a server also answers 404, and nothing follows from that."""
    verdict = found({PARENT: Running()})
    assert verdict is not None
    assert verdict.state is None
    assert verdict.by == f"the deletion of flow run {OWN} ({OWN})"
    with pytest.raises(httpx.HTTPStatusError):
        found({PARENT: Running()}, status=404)
