"""The file of an agent's own output (agent-0.log) hangs: the agent works, and loses no line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hanging import HangingFile
from jobs import refuse_agent
from training_jobs.job import Job, pause_all

from rekindle.recovery.journal import journal

# A line of Rekindle; after it the further lines of its text, or lines of ranks, may follow.
LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (INFO|WARNING|ERROR) (.+?): ")
RANKS = 2
STEP = 3


@pytest.fixture
def output(tmp_path: Path) -> Iterator[HangingFile]:
    """Return the file of the first agent's output, which hangs."""
    file = HangingFile(tmp_path / "job" / "agent-0.log")
    file.fill()
    yield file
    file.close()


def test_an_agent_whose_output_hangs(tmp_path: Path, output: HangingFile) -> None:
    """The agent connects to a new coordinator, although it cannot print that it lost the old one.

    It prints this later. At the job's end, the agent does not wait for its output. Each line of the
    agent and of the coordinator has a time, a level and the name of the process.
    """
    with Job(tmp_path, *pause_all(STEP, RANKS), processes=RANKS) as job:
        job.wait_pause(STEP)
        endpoint = job.directory.endpoint()
        assert endpoint is not None
        refuse_agent(endpoint, job.directory.secret())
        pids = [job.pid(rank) for rank in range(RANKS)]
        job.kill_coordinator()
        job.revive_coordinator()
        job.wait_event(journal.NodeJoined, 2)
        assert [job.pid(rank) for rank in range(RANKS)] == pids
        lost = " WARNING agent node=0: the agent lost its connection to the coordinator"
        assert lost not in output.text
        job.wait(lambda: lost in output.read(), "the agent's line")
        output.fill()
        job.release_all()
        assert job.end().outcome == "succeeded"
        assert job.events_of(journal.NodeWanted) == []
        assert writers(output.read()) == {"agent node=0"}
        assert writers((tmp_path / "job" / "coordinator.log").read_text()) == {"coordinator"}


def writers(log: str) -> set[str]:
    """Return the processes that wrote lines of a log. Each line of Rekindle has time and level."""
    own = [line for line in log.splitlines() if not line.startswith(("[default", " "))]
    found = [LINE.match(line) for line in own]
    assert all(found), log
    return {match[2] for match in found if match}
