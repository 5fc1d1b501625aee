"""SIGSTOP for 5, 30 and 70 s, and SIGKILL, of the flow process in each phase of its job.

`process_faults.TABLE` states the outcome of each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect_side import Served, ending_jobs, serve
from process_faults import Outcome, Row, Victim, rows
from process_faults.flow_job import FlowJob
from process_faults.playing import Gates, closed_at_first, play
from process_faults.started import digests, undisturbed_digests

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

FLOW = [row for row in rows() if row.victim is Victim.FLOW]


@pytest.fixture(scope="module")
def runner(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the train flow without other flow runs."""
    home = tmp_path_factory.mktemp("phases")
    with serve(prefect_api, home, "phases") as running, ending_jobs(home):
        yield running


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the digests of a job without a fault."""
    return undisturbed_digests(tmp_path_factory.mktemp("undisturbed") / "place")


@pytest.mark.parametrize("row", FLOW, ids=str)
def test_the_process_of_a_flow_run(
    row: Row, runner: Served, tmp_path: Path, undisturbed: list[str]
) -> None:
    """The job runs on without its flow process, and a rerun adopts it if the process has died."""
    gates = Gates(tmp_path)
    gates.close(*closed_at_first(row.phase))
    job = FlowJob(runner, tmp_path)
    play(row, job, gates)
    assert job.was_run_again() is (Outcome.ADOPTED in row.outcomes)
    assert digests(tmp_path) == undisturbed
