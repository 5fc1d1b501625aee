"""State in shards: a lost one comes from a replica, else all go back to what is kept of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.checks import (
    assert_recovered,
    assert_same_training,
    assert_samples_once,
    steps_lost,
)
from training_jobs.injection import Fault, held
from training_jobs.job import Job, pause_all
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle.recovery import journal
from rekindle.recovery.policy import Policy, Strategy

PAUSE_ALL = pause_all(12)
# Here no other rank can finish the step; before the update all ranks wait for each other.
BEFORE = ("between", "forward", "collective", "backward", "reduced")
PLACES = (
    *BEFORE,
    "update",
    "updated",
    "last line",
    "snapshot",
    "before SnapshotTaken",
)


def sources(run: Job) -> list[dict[str, int]]:
    """Where the ranks' states came from, in each generation but the first."""
    return [event.sources for event in run.events_of(journal.Formed)][1:]


def resume(run: Job, baseline: Record) -> None:
    """Another attempt, without faults, ends the training as if nothing had happened."""
    run.plan()
    run.start()
    assert run.end().outcome == "succeeded", run.story()
    assert_same_training(run.record, baseline)
    assert_samples_once(run.record)
    assert run.leftovers() == []


def test_shards_differ_and_replicas_do_not(baseline_of: Callable[[str], Record]) -> None:
    """What the tests below take for granted of their script."""
    hybrid, sharded = baseline_of("hybrid"), baseline_of("sharded")
    digests = [hybrid.result(rank)["digest"] for rank in range(RANKS)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]
    assert len({sharded.result(rank)["digest"] for rank in range(RANKS)}) == RANKS
    # The same training, however it is cut.
    assert hybrid.losses(3) == pytest.approx(sharded.losses(3), rel=1e-4)


@pytest.mark.parametrize("place", soak_but(PLACES, "update"))
def test_killed_rank_with_a_replica(
    place: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """The replica of the lost shard sends it: no step is lost, and nobody else is started anew."""
    baseline = baseline_of("hybrid")
    rank = PLACES.index(place) % RANKS
    run = job(*held(Fault(rank, place, 9)), variant="hybrid")
    run.release_abreast(0, 9 if place in BEFORE else 10)
    assert_recovered(run, baseline, replaced={rank})
    assert steps_lost(run) == [0]
    assert sources(run) == [{"self": RANKS - 1, "peer": 1}]


@pytest.mark.parametrize("place", soak_but(PLACES, PLACES[1], "updated"))
def test_killed_rank_without_a_replica(
    place: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """All go back to the newest snapshot that there is of every shard; only one is started anew."""
    baseline = baseline_of("sharded")
    rank = PLACES.index(place) % RANKS
    # After step 9 the second snapshot is due; of 13 steps done, or 14 where others were faster.
    step, lost = (9, (5,)) if "napshot" in place else (13, (3, 4))
    run = job(*held(Fault(rank, place, step)), variant="sharded", snapshot_every=5)
    run.release_abreast(0, step if place in BEFORE else step + 1)
    assert_recovered(run, baseline, replaced={rank})
    assert sources(run) == [{"snapshot": RANKS}]
    assert steps_lost(run)[0] in lost


def test_all_replicas_of_a_shard_killed(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """Then the others' live state is of no use either."""
    baseline = baseline_of("hybrid")
    run = job(*PAUSE_ALL, variant="hybrid", snapshot_every=5)
    run.wait_pause(12)
    run.kill(1, 3)
    run.release_all()
    assert_recovered(run, baseline, replaced={1, 3})
    assert sum(steps_lost(run)) == 2


def test_killed_rank_is_killed_again(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """A second fault while the shards are restored, and one of another rank after that."""
    faults = (Fault(2, "forward", 12), Fault(2, "start", None, life=2), Fault(0, "update", 17))
    run = job(*faults, variant="sharded", snapshot_every=5)
    assert_recovered(run, baseline_of("sharded"), replaced={0, 2})
    assert steps_lost(run)[-1] in (2, 3)


def test_all_ranks_killed(job: Callable[..., Job], baseline_of: Callable[[str], Record]) -> None:
    """Agents have a snapshot of each shard."""
    run = job(*PAUSE_ALL, variant="sharded", nodes=2, snapshot_every=5)
    run.wait_pause(12)
    run.kill(*range(RANKS))
    assert_recovered(run, baseline_of("sharded"), replaced=range(RANKS))
    assert sum(steps_lost(run)) == 2


@pytest.mark.parametrize("variant", soak_but(["sharded", "hybrid"], "sharded"))
def test_lost_node(
    variant: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """What was lost with the node comes from a replica elsewhere, else from its neighbour."""
    run = job(*PAUSE_ALL, variant=variant, nodes=2, snapshot_every=5, checkpoint_every=5)
    run.wait_pause(12)
    run.wait_event(journal.Checkpointed, step=10)
    if variant == "sharded":
        run.wait_copies(10, 2, 3)
    run.kill_node(1)
    run.release_all()
    assert_recovered(run, baseline_of(variant), replaced={2, 3})
    wanted = {
        "hybrid": ({"self": 2, "peer": 2}, 0),
        "sharded": ({"neighbour": 2, "snapshot": 2}, 2),
    }
    assert (sources(run)[-1], sum(steps_lost(run))) == wanted[variant]


@pytest.mark.parametrize("variant", soak_but(["sharded", "hybrid"], "hybrid"))
def test_checkpoint_holds_every_shard_once(
    variant: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """Several agents write it, one commits it, and another attempt goes on from it."""
    run = job(
        *PAUSE_ALL,
        variant=variant,
        nodes=2,
        snapshot_every=0,
        checkpoint_every=5,
        policy=Policy(node_timeout_s=0.5),
        replaces=False,
    )
    run.wait_pause(12)
    run.wait_event(journal.Checkpointed, step=10)
    run.kill_node(0, 1)
    assert run.end().outcome == "failed"
    [newest, *_] = run.checkpoints()
    shards = {"sharded": 4, "hybrid": 2}[variant]
    assert len(list(newest.glob("state-*.safetensors"))) == shards
    resume(run, baseline_of(variant))
    assert sources(run)[-1] == {"checkpoint": RANKS}


def test_before_the_first_snapshot(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """With a shard gone for good all begin anew, in processes that have trained nothing yet."""
    run = job(Fault(2, "forward", 3), variant="sharded", snapshot_every=5)
    assert_recovered(run, baseline_of("sharded"), replaced=range(RANKS))
    assert sources(run)[-1] == {"fresh": RANKS}


def test_last_words_of_shards(
    job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """A job that fails has the newest snapshots of all shards written as one checkpoint."""
    run = job(*PAUSE_ALL, Fault(1, "forward", 13, do="raise"), variant="sharded", nodes=2)
    run.wait_pause(12)
    run.release_all()
    assert run.end().outcome == "failed"
    [path] = run.checkpoints()
    assert path.name.startswith("step-0000000010")
    resume(run, baseline_of("sharded"))


def test_another_number_of_shards(job: Callable[..., Job]) -> None:
    """A checkpoint of four shards is not loaded as two: said with what to do, and kept."""
    run = job(variant="sharded", snapshot_every=0, checkpoint_every=8, steps=16)
    assert run.end().outcome == "succeeded"
    kept = run.checkpoints()
    run.start(arguments=(str(run.folder), "--variant", "hybrid", "--steps", "24"))
    ended = run.end()
    assert ended.outcome == "failed"
    assert "has the state in 4 pieces, this job in 2, and what they are pieces of" in ended.reason
    assert run.checkpoints() == kept


def test_a_world_that_may_shrink_is_refused(job: Callable[..., Job]) -> None:
    """Said at once, with what to do."""
    run = job(variant="sharded", nodes=2, min_nodes=1)
    ended = run.end()
    assert ended.outcome == "failed"
    assert "run it with --nnodes=2, not with 1:2" in ended.reason
    assert run.incidents()[-1].strategy is Strategy.FAIL
    assert run.leftovers() == []


def test_the_last_checkpoint_is_told_of(job: Callable[..., Job]) -> None:
    """The job does not end between the writing of its last shards and their commit."""
    run = job(variant="sharded", nodes=2, snapshot_every=0, checkpoint_every=24)
    assert run.end().outcome == "succeeded"
    [written] = run.events_of(journal.Checkpointed)
    assert (written.step, written.path) == (24, str(run.checkpoints()[0]))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SHARD_OF_LIFE_2": "0"}, "rank 3 has shard 0 of the training state, and had shard 3"),
        ({"WHOLE": "1"}, "rank 1 says that all ranks have the same training state"),
    ],
)
def test_shards_that_do_not_fit(
    environment: dict[str, str], said: str, job: Callable[..., Job]
) -> None:
    """A rank that takes another shard than before, or says that there are none: nothing is lost."""
    run = job(Fault(3, "forward", 9), variant="sharded", misfit=environment)
    ended = run.end()
    assert ended.outcome == "failed"
    assert said in ended.reason
    assert run.leftovers() == []


def test_one_shard_by_another_number(job: Callable[..., Job]) -> None:
    """A replica group is the same by whatever number: its checkpoint is found again."""
    run = job(variant="one", snapshot_every=0, checkpoint_every=8, steps=16)
    assert run.end().outcome == "succeeded"
    run.start(arguments=(str(run.folder), "--variant", "one", "--steps", "24"))
    assert run.end().outcome == "succeeded"
    assert run.events_of(journal.Formed)[-1].step == 16
