"""Training state in shards: a lost shard comes from a replica, or from snapshots.

`hybrid` has each shard twice, `sharded` has each shard once. Each is one job of a few attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import RANKS
from training_jobs.acts import kill, lose, lose_and_end
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.memory import COPIES, buffers
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.processes import environment
from training_jobs.record import Record
from training_jobs.rows import NODE, killed_abreast, paused

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

pytestmark = pytest.mark.timeout(300)  # the first test of a job waits for its end
STEPS = 80
# At these places no other rank can finish the step; before the update all ranks wait for each
# other.
BEFORE = ("between", "forward", "collective", "backward", "reduced")
PLACES = (*BEFORE, "update", "updated", "last line", "snapshot", "before SnapshotTaken")


def killed_everywhere(first: int, *, loses: bool, **expected: Any) -> list[Row]:
    """Return a row for each place: a rank is killed there, in the fourth step after a snapshot.

    A rank killed during a snapshot ends one step later. loses: whether the steps since the snapshot
    are lost.
    """
    rows = []
    for number, place in enumerate(PLACES):
        late = "napshot" in place
        step = first + 5 * number + late
        others = step if place in BEFORE else step + 1
        lost = ({5} if late else {3, 4}) if loses else {0}
        rows.append(killed_abreast(place, step, number % RANKS, others, lost=lost, **expected))
    return rows


def copies(job: Job) -> tuple[list[Path], dict[int, tuple[int, ...]]]:
    """Return the nodes' replicas of other nodes' snapshots."""
    nodes = range(job.spec.nodes)
    return [path for node in nodes for path in buffers(job.agent_pid(node), COPIES)], job.copies()


def shards(job: Job) -> int:
    """Return the number of shards in the newest checkpoint."""
    return len(list(job.checkpoints()[0].glob("state-*.safetensors")))


def test_shards_differ_and_replicas_do_not(baseline_of: Callable[..., Record]) -> None:
    """The script's shards differ and its replicas are equal, as the other tests assume."""
    hybrid, sharded = (baseline_of(variant, steps=STEPS) for variant in ("hybrid", "sharded"))
    digests = [hybrid.result(rank)["digest"] for rank in range(RANKS)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]
    assert len({sharded.result(rank)["digest"] for rank in range(RANKS)}) == RANKS
    # The training is the same with each division into shards.
    assert hybrid.losses(3)[:24] == pytest.approx(sharded.losses(3)[:24], rel=1e-4)


# ---- with replicas

HYBRID = (
    *killed_everywhere(13, loses=False, sources=[{"self": RANKS - 1, "peer": 1}]),
    paused("no copies", 67, copies, strategies=()),
    paused("all replicas of a shard", 72, kill(1, 3), strategies=None, lost=2, replaced={1, 3}),
    paused(
        "lost node",
        76,
        lose(1),
        strategies=NODE,
        replaced={2, 3},
        sources=[{"self": 2, "peer": 2}],
    ),
)
BOTH_LOST = Attempt(
    (paused("both nodes lost", 12, lose_and_end(0, 1, checkpoint=10)),),
    {"snapshot_every": 0, "checkpoint_every": 5},
    outcome="stopped",
    replaces=False,
    name="both lost",
    after=shards,
)
HYBRID_PLAN = Plan(
    "hybrid",
    (BOTH_LOST, Attempt(HYBRID, {"snapshot_every": 5, "checkpoint_every": 0})),
    variant="hybrid",
    steps=STEPS,
    settings={"nodes": 2},
)


@pytest.fixture(scope="module")
def hybrid(ended_of: EndedOf) -> tuple[Ended, Ended]:
    """Run an attempt that loses both nodes, and an attempt with the rows."""
    ended = ended_of(HYBRID_PLAN)
    return ended.only(0), ended.only(1)


def test_checkpoint_holds_every_shard_once(hybrid: tuple[Ended, Ended]) -> None:
    """Several agents write a checkpoint and one commits it; the next attempt starts from it."""
    first, second = hybrid
    first.check_ends()
    assert first.after["both lost"] == 2
    assert second.began() == (10, {"checkpoint": RANKS})


@pytest.mark.parametrize("row", HYBRID, ids=str)
def test_with_a_replica(row: Row, hybrid: tuple[Ended, Ended]) -> None:
    """The replica sends the lost shard: no step is lost, and no other rank is replaced."""
    hybrid[1].check(row)


def test_no_copies_of_replicas(hybrid: tuple[Ended, Ended]) -> None:
    """A node keeps no replicas of snapshots if another node has the replica of each shard."""
    assert hybrid[1].seen["no copies"] == ([], {})


def test_end_with_replicas(hybrid: tuple[Ended, Ended], baseline_of: Callable[..., Record]) -> None:
    """The job equals the uninterrupted one, bit by bit."""
    hybrid[1].check_end(baseline_of("hybrid", steps=STEPS))


# ---- without

SHARDED = (
    # Processes that have not trained yet start from step 0.
    Row(
        "before the first snapshot",
        3,
        (Fault(2, "forward", 3, life=0),),
        strategies=None,
        lost=None,
        replaced=range(RANKS),
        sources=[{"fresh": RANKS}],
    ),
    *killed_everywhere(8, loses=True, sources=[{"snapshot": RANKS}]),
    # The rank is killed again while the shards are restored; later another rank is killed.
    Row(
        "killed again",
        58,
        (Fault(2, "forward", 58, life=0), Fault(2, "start", life=0, after=1)),
        strategies=None,
        lost=3,
        replaced={2},
    ),
    Row(
        "another rank after that",
        63,
        (Fault(0, "update", 63, life=0),),
        lost={3, 4},
        replaced={0},
        sources=[{"snapshot": RANKS}],
    ),
    paused("all ranks", 67, kill(*range(RANKS)), strategies=None, lost=2, replaced=range(RANKS)),
)


def with_environment(**more: str) -> Callable[[Job], dict[str, Any]]:
    """Return a change that gives the ranks these variables."""
    return lambda job: {"environment": environment(job.mark) | more}


def another_shard(job: Job) -> dict[str, Any]:
    """Give the next replacement of rank 3 another shard; all ranks are on one node."""
    life = len(job.record.lives(3)) + 2
    own = with_environment(ANOTHER_SHARD=f"rank 3, life {life}")(job)
    return {"nodes": 1, "processes_per_node": RANKS} | own


def of_variant(job: Job, variant: str) -> dict[str, Any]:
    """Give the script another variant."""
    folder, option, _, *more = job.spec.arguments
    return with_environment()(job) | {"arguments": (folder, option, variant, *more)}


def last(job: Job) -> dict[str, Any]:
    """Restore the first description of the job, with a checkpoint at its end only."""
    changes = {"nodes": 2, "processes_per_node": RANKS // 2}
    changes |= {"snapshot_every": 0, "checkpoint_every": STEPS}
    return of_variant(job, "sharded") | changes


RAISES = Row("raises", 72, (Fault(1, "forward", 72, do="raise", life=0),))
OF_SHARDS = (
    paused("no copies on one node", 72, copies, strategies=()),
    Row("killed", 75, (Fault(3, "forward", 74, life=0),)),
)
FAILS: dict[str, Any] = {"outcome": "failed", "after": Job.checkpoints}
# Attempts with different ends; one of them has the rows.
SHARDED_PLAN = Plan(
    "sharded",
    (
        Attempt((), {"min_nodes": 1}, name="may shrink", **FAILS),
        Attempt((*SHARDED, RAISES), {"min_nodes": 0}, name="rows", **FAILS),
        Attempt(OF_SHARDS, another_shard, name="another shard", **FAILS),
        Attempt((), with_environment(WHOLE="1"), name="no shards", **FAILS),
        Attempt((), lambda job: of_variant(job, "hybrid"), name="other number", **FAILS),
        Attempt((), last, name="end"),
    ),
    variant="sharded",
    steps=STEPS,
    settings={"nodes": 2},
)


@pytest.fixture(scope="module")
def sharded(ended_of: EndedOf) -> Ended:
    """Run the job of all these attempts."""
    return ended_of(SHARDED_PLAN)


@pytest.mark.parametrize("row", SHARDED, ids=str)
def test_without_a_replica(row: Row, sharded: Ended) -> None:
    """All ranks load the newest step with snapshots of all shards; one rank is replaced."""
    sharded.only("rows").check(row)


def test_a_world_that_may_shrink_is_refused(sharded: Ended) -> None:
    """The job fails before its first step, with a message that names the right option."""
    attempt = sharded.only("may shrink")
    [end] = attempt.check_ends()
    assert "run the job with --nnodes=2, not with 1:2" in end.reason
    assert attempt.incidents[-1].strategy is Strategy.FAIL


def test_final_checkpoint_of_shards(sharded: Ended) -> None:
    """A job that fails writes the newest snapshots of all shards as one checkpoint."""
    sharded.only("rows").check_ends()
    [path] = sharded.after["rows"]
    assert path.name.startswith("step-0000000070")
    assert sharded.only("another shard").began() == (70, {"checkpoint": RANKS})


def test_no_copies_on_one_node(sharded: Ended) -> None:
    """On one node there are no replicas, because there is no other node."""
    assert sharded.seen["no copies on one node"] == ([], {})


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        ("another shard", "rank 3 has shard 0 of the training state, but had shard 3"),
        ("no shards", "rank 1 has the complete training state"),
        (
            "other number",
            "has the state in 4 pieces, but this job has 2",
        ),
    ],
)
def test_shards_that_do_not_fit(attempt: str, text: str, sharded: Ended) -> None:
    """A job fails if a rank has another shard than before, or none, or the number differs."""
    [end] = sharded.only(attempt).check_ends()
    assert text in end.reason


def test_a_checkpoint_that_does_not_fit_is_kept(sharded: Ended) -> None:
    """A job with fewer shards does not load the checkpoint and does not remove it."""
    assert sharded.after["other number"] == sharded.after["no shards"] != []


def test_end_without_replicas(sharded: Ended, baseline_of: Callable[..., Record]) -> None:
    """After all attempts the job equals the uninterrupted one, bit by bit."""
    end = sharded.only("end")
    assert end.began() == (70, {"checkpoint": RANKS})
    end.check_end(baseline_of("sharded", steps=STEPS))


def test_the_last_checkpoint_is_told_of(sharded: Ended) -> None:
    """The job does not end between the write of its last shards and their commit."""
    attempt = sharded.only("end")
    [written] = attempt.of(journal.Checkpointed)
    assert (written.step, written.path) == (STEPS, str(attempt.job.checkpoints()[0]))


# ---- one shard


def eight_more(job: Job) -> dict[str, Any]:
    """Let the script train eight more steps."""
    return {"arguments": (*job.spec.arguments[:-1], "24")}


ONE = Plan(
    "one",
    (Attempt(), Attempt((), eight_more)),
    variant="one",
    steps=16,
    settings={"snapshot_every": 0, "checkpoint_every": 8},
)


def test_one_shard_by_another_number(ended_of: EndedOf) -> None:
    """A job finds its checkpoint again, independent of the number of its only shard."""
    ended = ended_of(ONE)
    ended.check_ends()
    assert ended.only(1).began() == (16, {"checkpoint": RANKS})
