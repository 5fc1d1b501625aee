"""A cancelled flow run stops its job, unless another flow run steers it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled

from rekindle.job.spec import Endpoint
from rekindle.tasks.hooks import cancellation
from rekindle.tasks.hooks.cancellation import stop_job
from rekindle.tasks.identity import LABEL

OWN, OTHER = (UUID(f"00000000-0000-0000-0000-00000000000{number}") for number in (1, 2))


@pytest.mark.parametrize(
    ("holder", "stops"),
    [
        (f"flow run one ({OTHER}), process 7 on host", False),
        (f"flow run two ({OWN}), process 7 on host", True),
        ("", True),
    ],
)
def test_a_cancelled_run_stops_only_a_job_that_no_other_run_steers(
    holder: str, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs can have one `job_id`. To cancel the one that must be refused changes nothing."""
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path))
    stopped: list[str] = []

    def stop(by: str) -> None:
        stopped.append(by)

    client = SimpleNamespace(status=lambda: SimpleNamespace(holder=holder), stop=stop)
    endpoint = Endpoint(host="127.0.0.1", port=1, pid=1, attempt=1)
    monkeypatch.setattr(cancellation.jobs, "coordinator_of", lambda job_id: endpoint)
    monkeypatch.setattr(cancellation.jobs, "client_of", lambda job_id, endpoint: client)
    monkeypatch.setattr(cancellation, "report_later", lambda job_id, flow_run_id: None)
    monkeypatch.setattr(cancellation, "flow_run_logger", lambda run, flow: logging.getLogger())
    run = FlowRun.model_validate({"flow_id": OWN, "id": OWN, "name": "two", "labels": {LABEL: "a"}})
    stop_job(SimpleNamespace(name="train"), run, Cancelled())
    assert bool(stopped) == stops
