"""MindIO's ARF without MindIO: a new process joins the ranks of a loop with MindIO's names.

One job has all faults.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import training_jobs
from training_jobs.acts import kill
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault, held
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.record import Record
from training_jobs.rows import NODE, killed_abreast, paused

from rekindle.names import SPARE
from rekindle.recovery.journal import journal

pytestmark = pytest.mark.timeout(400)  # the first test waits for the job's end
SCRIPT = Path(training_jobs.__file__).with_name("adaptor.py")
RANKS, STEPS = 3, 36


def lose_rank_after_coordinator(job: Job) -> None:
    """Kill the coordinator, start another one, and kill a rank."""
    job.kill_coordinator()
    job.revive_coordinator()
    job.kill(1)


def lost_node(node: int, step: int, spares: int) -> Row:
    """Return the row of a lost node that a spare replaces, the last of `spares` since the start.

    Node 0 has had the store of all ranks.
    """

    def act(job: Job, number: int) -> None:
        job.wait_fault(number)
        job.wait_event(journal.NodeJoined, spares, node=SPARE)
        job.kill_node(node)

    pause = Fault(node, "forward", step, life=0, do="pause")
    return Row(f"node {node}", step, (pause,), act, NODE, replaced={node})


NOBODY = paused(
    "no rank is left",
    4,
    kill(*range(RANKS)),
    ranks=RANKS,
    strategies=None,
    lost=None,
    replaced=range(RANKS),
)
FORWARD = killed_abreast("forward", 7, 1, others=7)
# Peers complete the update of a step for which they have all gradients.
UPDATE = killed_abreast("update", 11, 1, others=12)
REBUILD = Row(
    "killed while groups are rebuilt",
    15,
    (*held(Fault(0, "forward", 15, life=0)), Fault(2, "rebuild", 15, life=0)),
    lambda job, number: job.release_abreast(number, 15),
    strategies=None,
    replaced={0, 2},
)
SPARE_0, SPARE_2 = lost_node(0, 19, spares=1), lost_node(2, 23, spares=2)
COORDINATOR = paused(
    "after the coordinator",
    28,
    lose_rank_after_coordinator,
    ranks=RANKS,
    strategies=None,
    replaced={1},
)
ROWS = (NOBODY, FORWARD, UPDATE, REBUILD, SPARE_0, SPARE_2, COORDINATOR)
PLAN = Plan(
    "adaptor",
    (Attempt(ROWS),),
    ranks=RANKS,
    steps=STEPS,
    settings={"script": SCRIPT, "nodes": RANKS, "spares": 1},
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the record of a run without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Job(folder, script=SCRIPT, processes=RANKS, steps=STEPS) as job:
        assert job.end().outcome == "succeeded", job.story()
    return job.record


@pytest.fixture(scope="module")
def ended(ended_of: EndedOf) -> Ended:
    """Return the job after all rows."""
    return ended_of(PLAN)


def calls(ended: Ended, row: Row, rank: int) -> list[Any]:
    """Return the handler calls of a rank for a row; the last call is a rollback."""
    path = ended.job.folder / f"calls-{rank}.jsonl"
    found: list[list[Any]] = [[]]
    for line in path.read_text().splitlines():
        found[-1].append(json.loads(line))
        if found[-1][-1][0] == "rollback":
            found.append([])
    return found[ROWS.index(row) - 1]  # the first row has no rollback


def calls_after_clean(ended: Ended, row: Row, rank: int) -> list[Any]:
    """Return the calls without the stop and clean of the device."""
    found = calls(ended, row, rank)
    assert all(call == ["clean", False] for call in found if call[0] == "clean")
    return [call for call in found if call[0] not in ("stop", "clean")]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_recovery(row: Row, ended: Ended) -> None:
    """No step is lost while a rank is left; the other ranks keep their processes."""
    ended.check(row)


@pytest.mark.parametrize(("row", "done"), [(FORWARD, 7), (UPDATE, 12)], ids=str)
def test_a_new_process_joins_the_others_in_theirs(row: Row, done: int, ended: Ended) -> None:
    """All ranks form their groups again, and the new process gets the state from a peer."""
    rebuilt, rolled_back = ["rebuild", [1], "recover"], ["rollback", done]
    receives = ["repair", done, "RT_RECV_REPAIR", [1]]
    assert calls_after_clean(ended, row, 1) == [rebuilt, receives, rolled_back]
    sent = []
    for rank in (0, 2):
        found = calls_after_clean(ended, row, rank)
        sent += found[1:-1]
        assert (found[0], found[-1]) == (rebuilt, rolled_back)
        # A process that was killed before the row may have stopped its device as well.
        device = [call for call in calls(ended, row, rank) if call[0] in ("stop", "clean")]
        assert device[-2:] == [["stop"], ["clean", False]]
    assert sent == [["repair", done, "RT_SEND", [1]]]


@pytest.mark.parametrize(
    ("row", "rank", "new"),
    [(REBUILD, 1, [0, 2]), (SPARE_0, 1, [0]), (SPARE_2, 1, [2]), (COORDINATOR, 0, [1])],
    ids=str,
)
def test_groups_are_formed_with_the_new_processes(
    row: Row, rank: int, new: list[int], ended: Ended
) -> None:
    """All ranks rebuild their groups with the new processes.

    Errors of the other ranks during the rebuild do not count as their faults.
    """
    assert ["rebuild", new, "recover"] in calls_after_clean(ended, row, rank)


def test_when_no_rank_is_left_all_begin_again(ended: Ended) -> None:
    """If no rank is left, all ranks start from step 0; no new process tries to join others."""
    incident = ended.check(NOBODY)
    assert incident is not None
    assert incident.resumed_at == 0
    for rank in range(RANKS):
        first, *_ = calls_after_clean(ended, FORWARD, rank)
        assert first == ["rebuild", [1], "recover"]


def test_end(ended: Ended, undisturbed: Record) -> None:
    """All losses and parameters equal those of the undisturbed run."""
    ended.check_ends()
    ended.check_processes()
    record = ended.job.record
    for rank in range(RANKS):
        wanted = undisturbed.losses(rank)
        assert record.losses(rank) == wanted
        assert all(line["metrics"]["loss"] == wanted[line["step"]] for line in record.lines(rank))
        assert record.result(rank)["digest"] == undisturbed.result(0)["digest"]
