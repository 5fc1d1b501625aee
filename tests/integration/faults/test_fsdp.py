"""FSDP2 models: whatever the step broke off in, they live on with the next generation's groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal

PAUSE_ALL = pause_all(12)
PLACES = ("forward", "forward 0", "forward 2", "backward 2", "backward 0", "update", "updated")


def sources(run: Job) -> list[dict[str, int]]:
    """Where the ranks' states came from, in each generation but the first."""
    return [event.sources for event in run.events_of(journal.Formed)][1:]


def test_pieces_and_replicas(baseline_of: Callable[[str], Record]) -> None:
    """What the tests below take for granted of their script."""
    hsdp, fsdp = baseline_of("hsdp"), baseline_of("fsdp")
    digests = [hsdp.result(rank)["digest"] for rank in range(RANKS)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]
    assert len({fsdp.result(rank)["digest"] for rank in range(RANKS)}) == RANKS
    assert hsdp.losses(1) == pytest.approx(fsdp.losses(1), rel=1e-3)


@pytest.mark.parametrize("place", soak_but(PLACES, "forward"))
def test_killed_rank_of_hsdp(
    place: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """Its replica sends the piece that was lost: no step is lost, the others stay as they are."""
    rank = PLACES.index(place) % RANKS
    baseline = baseline_of("hsdp")
    run = job(Fault(rank, place, 9), variant="hsdp")
    assert_recovered(run, baseline, replaced={rank})
    assert steps_lost(run) == [0]
    assert sources(run) == [{"self": RANKS - 1, "peer": 1}]


@pytest.mark.parametrize("place", soak_but(PLACES, "backward 0"))
def test_killed_rank_of_fsdp(
    place: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """Nobody else has its piece: all go back to the snapshots of one step, in their processes."""
    rank = PLACES.index(place) % RANKS
    baseline = baseline_of("fsdp")
    run = job(Fault(rank, place, 13), variant="fsdp", snapshot_every=5)
    assert_recovered(run, baseline, replaced={rank})
    assert sources(run) == [{"snapshot": RANKS}]


@pytest.mark.parametrize("variant", soak_but(["fsdp", "hsdp"], "hsdp"))
def test_fault_after_fault(
    variant: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """Of a second rank, of the replacement on its way, and of the same place again."""
    faults = (
        Fault(1, "backward 1", 12),
        Fault(1, "receive" if variant == "hsdp" else "start", None, life=2),
        Fault(2, "forward 1", 14),
        Fault(1, "backward 2", 18, life=3),
    )
    baseline = baseline_of(variant)
    run = job(*faults, variant=variant, snapshot_every=5)
    assert_recovered(run, baseline, replaced={1, 2})


@pytest.mark.parametrize(
    ("how", "variant"),
    soak_but(
        [(how, variant) for how in ("link", "hiccup") for variant in ("fsdp", "hsdp")],
        ("hiccup", "hsdp"),
    ),
)
def test_step_is_done_again(
    how: str, variant: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """A fault that broke no process costs none, and no step: gathered pieces are let go of."""
    baseline = baseline_of(variant)
    run = job(Fault(2, "backward 1", 9, do=how), variant=variant)
    assert_recovered(run, baseline, replaced=())
    assert steps_lost(run) == [0]
    assert sources(run) == [{"self": RANKS}]


@pytest.mark.parametrize("variant", soak_but(["fsdp", "hsdp"], "fsdp"))
def test_lost_node(
    variant: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """New processes build their model before there is a group, and get its state."""
    baseline = baseline_of(variant)
    run = job(*PAUSE_ALL, variant=variant, nodes=2, snapshot_every=5, checkpoint_every=5)
    run.wait_pause(12)
    run.wait_event(journal.Checkpointed, step=10)
    run.kill_node(1)
    run.release_all()
    assert_recovered(run, baseline, replaced={2, 3})
    assert sum(steps_lost(run)) == {"hsdp": 0, "fsdp": 2}[variant]


def test_all_processes_killed(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """Each gets its piece, and the optimizer's state of it, from its agent."""
    baseline = baseline_of("hsdp")
    run = job(*PAUSE_ALL, variant="hsdp", snapshot_every=6)
    run.wait_pause(12)
    run.kill(*range(RANKS))
    assert_recovered(run, baseline, replaced=range(RANKS))
    assert sum(steps_lost(run)) == 0
