"""FSDP2 models continue with the groups of the next generation, wherever a step has failed.

`hsdp` has each piece twice, `fsdp` has each piece once. Each is one job that meets all faults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from training_jobs import RANKS
from training_jobs.acts import kill, lose
from training_jobs.injection import Fault
from training_jobs.record import Record
from training_jobs.scenes import NODE, RETRY, Attempts, Ended, Row, paused

pytestmark = pytest.mark.timeout(300)  # the first test of a job waits for its end
STEPS = 70
PLACES = ("forward", "forward 0", "forward 2", "backward 2", "backward 0", "update", "updated")


def killed_everywhere(**expected: Any) -> list[Row]:
    """Return a row for each place: a rank dies there, three steps after a snapshot."""
    rows = []
    for number, place in enumerate(PLACES):
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
    """Return a row: a fault breaks no process."""
    fault = Fault(2, "backward 1", step, life=0, do=how)
    return Row(how, step, (fault,), strategies=RETRY, sources={"self": RANKS})


HSDP = [
    *killed_everywhere(sources={"self": RANKS - 1, "peer": 1}),
    fault_after_fault("receive"),
    done_again("link", 53),
    done_again("hiccup", 57),
    paused("lost node", 62, lose(1, checkpoint=60), strategies=NODE, replaced={2, 3}),
    # Each rank gets its piece, and the optimizer's state of it, from its agent.
    paused("all processes", 65, kill(*range(RANKS)), strategies=None, replaced=range(RANKS)),
]
FSDP = [
    *killed_everywhere(sources={"snapshot": RANKS}, lost={3, 4}),
    fault_after_fault("start"),
    done_again("link", 53),
    done_again("hiccup", 57),
    paused("lost node", 62, lose(1, checkpoint=60), strategies=None, lost=2, replaced={2, 3}),
]
SETTINGS = {"nodes": 2, "steps": STEPS, "snapshot_every": 5, "checkpoint_every": 20}


def test_pieces_and_replicas(baseline_of: Callable[..., Record]) -> None:
    """The tests below take this for granted of their script."""
    hsdp, fsdp = (baseline_of(variant, steps=STEPS) for variant in ("hsdp", "fsdp"))
    digests = [hsdp.result(rank)["digest"] for rank in range(RANKS)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]
    assert len({fsdp.result(rank)["digest"] for rank in range(RANKS)}) == RANKS
    assert hsdp.losses(1)[:24] == pytest.approx(fsdp.losses(1)[:24], rel=1e-3)


@pytest.fixture(scope="module")
def hsdp(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The job with replicas."""
    with Attempts(tmp_path_factory.mktemp("hsdp"), variant="hsdp", **SETTINGS) as run:
        return run.meet(*HSDP)


@pytest.mark.parametrize("row", HSDP, ids=str)
def test_hsdp(row: Row, hsdp: Ended) -> None:
    """A replica sends the piece that was lost: no step is lost, the others stay as they are."""
    hsdp.check(row)


def test_end_of_hsdp(hsdp: Ended, baseline_of: Callable[..., Record]) -> None:
    """The job is the uninterrupted one, to the bit."""
    hsdp.check_end(baseline_of("hsdp", steps=STEPS))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The job without replicas."""
    with Attempts(tmp_path_factory.mktemp("fsdp"), variant="fsdp", **SETTINGS) as run:
        return run.meet(*FSDP)


@pytest.mark.parametrize("row", FSDP, ids=str)
def test_fsdp(row: Row, fsdp: Ended) -> None:
    """No other rank has a piece: all go back to the snapshots of one step, in their processes."""
    fsdp.check(row)


def test_end_of_fsdp(fsdp: Ended, baseline_of: Callable[..., Record]) -> None:
    """The job is the uninterrupted one, to the bit."""
    fsdp.check_end(baseline_of("fsdp", steps=STEPS))
