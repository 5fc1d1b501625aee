"""Worlds of eight ranks: what holds of four holds of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

RANKS = 8
PAUSE_ALL = pause_all(12, RANKS)


@pytest.mark.parametrize(
    ("variant", "rank", "place"),
    soak_but(
        [
            ("ddp", 5, "backward"),
            ("ddp", 0, "update"),
            ("plain", 7, "collective"),
            ("hsdp", 6, "backward 1"),
            ("hsdp", 1, "updated"),
        ],
        ("ddp", 5, "backward"),
    ),
)
def test_killed_rank(
    variant: str, rank: int, place: str, job: Callable[..., Job], baseline_of: Callable[..., Record]
) -> None:
    """One process is started anew, and no step is lost."""
    run = job(Fault(rank, place, 9), variant=variant, processes=RANKS)
    assert_recovered(run, baseline_of(variant, RANKS), replaced={rank})
    assert steps_lost(run) == [0]


@pytest.mark.parametrize("variant", soak_but(["ddp", "hsdp"], "hsdp"))
def test_half_of_the_ranks_killed(
    variant: str, job: Callable[..., Job], baseline_of: Callable[..., Record]
) -> None:
    """One of each pair of replicas, on four nodes of two ranks."""
    dead = {0, 5, 2, 7}
    run = job(*PAUSE_ALL, variant=variant, processes=RANKS, nodes=4)
    run.wait_pause(12)
    run.kill(*dead)
    run.release_all()
    assert_recovered(run, baseline_of(variant, RANKS), replaced=dead)
    assert set(steps_lost(run)) == {0}


@pytest.mark.soak
@pytest.mark.parametrize("variant", ["ddp", "hsdp"])
def test_lost_node(
    variant: str, job: Callable[..., Job], baseline_of: Callable[..., Record]
) -> None:
    """Its ranks get their state from those of other nodes."""
    run = job(*PAUSE_ALL, variant=variant, processes=RANKS, nodes=4)
    run.wait_pause(12)
    run.kill_node(2)
    run.release_all()
    assert_recovered(run, baseline_of(variant, RANKS), replaced={4, 5})
    assert set(steps_lost(run)) == {0}


@pytest.mark.soak
def test_cut_up_eight_times(job: Callable[..., Job], baseline_of: Callable[..., Record]) -> None:
    """Without a replica all go back to the snapshots of one step."""
    run = job(Fault(3, "backward 0", 13), variant="fsdp", processes=RANKS, snapshot_every=5)
    assert_recovered(run, baseline_of("fsdp", RANKS), replaced={3})
    assert steps_lost(run)[0] in (3, 4)
