"""FSDP2 models continue with the groups of the next generation, after a fault at any place.

`hsdp` has each piece twice, `fsdp` has each piece once. Each table is one job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from training_jobs import RANKS
from training_jobs.acts import kill, lose
from training_jobs.ended import EndedOf
from training_jobs.injection import Fault
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.record import Record
from training_jobs.rows import NODE, RETRY, paused

pytestmark = pytest.mark.timeout(300)  # the first test of a job waits for its end
STEPS = 70
PLACES = ("forward", "forward 0", "forward 2", "backward 2", "backward 0", "update", "updated")


def killed(*places: str, **expected: Any) -> list[Row]:
    """Return a row for each place: a rank is killed there, three steps after a snapshot."""
    rows = []
    for place in places:
        number = PLACES.index(place)
        rank, step = number % RANKS, 8 + 5 * number
        fault = Fault(rank, place, step, life=0)
        rows.append(Row(f"killed at {place}", step, (fault,), replaced={rank}, **expected))
    return rows


def fault_after_fault(place: str) -> Row:
    """Return a row of four faults; the second one ends the replacement of the first rank."""
    faults = (
        Fault(1, "backward 1", 42, life=0),
        Fault(1, place, life=0, after=1),
        Fault(2, "forward 1", 44, life=0),
        Fault(1, "backward 2", 48, life=0),
    )
    return Row("fault after fault", 42, faults, strategies=None, lost=None, replaced={1, 2})


def done_again(how: str, step: int) -> Row:
    """Return the row of a fault that ends no process."""
    fault = Fault(2, "backward 1", step, life=0, do=how)
    return Row(how, step, (fault,), strategies=RETRY, sources=[{"self": RANKS}])


def lost_node(**expected: Any) -> Row:
    """Return the row of a lost node: its new processes build their model before any group."""
    act = lose(1, checkpoint=60)
    return paused("lost node", 62, act, replaced={2, 3}, **expected)


FROM_PEER = {"sources": [{"self": RANKS - 1, "peer": 1}]}
FROM_SNAPSHOTS = {"sources": [{"snapshot": RANKS}], "lost": {3, 4}}
TABLES = {
    "hsdp": [
        *killed("forward", **FROM_PEER),
        fault_after_fault("receive"),
        done_again("hiccup", 57),
        # Each rank gets its piece and the piece's optimizer state from its agent.
        paused("all processes", 65, kill(*range(RANKS)), strategies=None, replaced=range(RANKS)),
    ],
    "fsdp": [
        *killed("backward 0", **FROM_SNAPSHOTS),
        done_again("link", 53),
        lost_node(strategies=None, lost=2),
    ],
    # The import of FSDP2 takes a second in each process: the other places run in the soak only.
    "hsdp in the soak": [
        *killed(*PLACES[1:], **FROM_PEER),
        done_again("link", 53),
        lost_node(strategies=NODE),
    ],
    "fsdp in the soak": [
        *(row for row in killed(*PLACES, **FROM_SNAPSHOTS) if "backward 0" not in row.name),
        fault_after_fault("start"),
        done_again("hiccup", 57),
    ],
}
PLANS = {
    table: Plan(
        table,
        (Attempt(tuple(rows)),),
        variant=table[:4],
        steps=STEPS,
        settings={"nodes": 2, "snapshot_every": 5, "checkpoint_every": 20},
    )
    for table, rows in TABLES.items()
}


def marks(table: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a table's tests."""
    return [pytest.mark.soak] if "soak" in table else []


def test_pieces_and_replicas(baseline_of: Callable[..., Record]) -> None:
    """The script's shards differ and its replicas are equal, as the other tests assume."""
    hsdp, fsdp = (baseline_of(variant, steps=STEPS) for variant in ("hsdp", "fsdp"))
    digests = [hsdp.result(rank)["digest"] for rank in range(RANKS)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]
    assert len({fsdp.result(rank)["digest"] for rank in range(RANKS)}) == RANKS
    assert hsdp.losses(1)[:24] == pytest.approx(fsdp.losses(1)[:24], rel=1e-3)


@pytest.mark.parametrize(
    ("table", "row"),
    [
        pytest.param(table, row, marks=marks(table), id=f"{table}: {row}")
        for table, rows in TABLES.items()
        for row in rows
    ],
)
def test_row(table: str, row: Row, ended_of: EndedOf) -> None:
    """A replica sends the lost piece; without a replica, all ranks load their snapshots."""
    ended_of(PLANS[table]).check(row)


@pytest.mark.parametrize("table", [pytest.param(each, marks=marks(each)) for each in TABLES])
def test_end(table: str, ended_of: EndedOf, baseline_of: Callable[..., Record]) -> None:
    """The job equals the uninterrupted one, bit by bit."""
    ended_of(PLANS[table]).check_end(baseline_of(table[:4], steps=STEPS))
