"""SIGSTOP for 5, 30 and 70 s, and SIGKILL, of each process of a job in each phase of the job.

`process_faults.TABLE` states the outcome of each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Place
from process_faults import Row, Victim, rows
from process_faults.playing import Gates, closed_at_first, play
from process_faults.started import CommandJob, digests, undisturbed_digests
from training_jobs.selection import soak_but

pytestmark = pytest.mark.timeout(900)

QUICK = {
    "all-training-stop-5",
    "coordinator-start-kill",
    "launcher-training-kill",
    "agent-checkpoint-kill",
}
COMMAND = [row for row in rows() if row.victim is not Victim.FLOW]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the digests of a job without a fault."""
    return undisturbed_digests(tmp_path_factory.mktemp("undisturbed") / "place")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Return a folder with its own home; at the end no process or memory file may remain."""
    with Place(tmp_path / "place") as found:
        yield found


@pytest.mark.parametrize(
    "row", soak_but(COMMAND, *(row for row in COMMAND if str(row) in QUICK)), ids=str
)
def test_a_process_of_a_command(row: Row, place: Place, undisturbed: list[str]) -> None:
    """The job has the stated outcome, the digests of an undisturbed run, and leaves nothing."""
    gates = Gates(place.folder)
    gates.close(*closed_at_first(row.phase))
    play(row, CommandJob(place).start(), gates)
    assert digests(place.folder) == undisturbed
