"""Training state in shards: a lost shard comes from a replica; without one, from snapshots.

`hybrid` has each shard twice, `sharded` has each shard once. Each is one job of a few attempts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import RANKS
from training_jobs.acts import kill, lose, lose_and_end
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.memory import COPIES, buffers
from training_jobs.processes import environment
from training_jobs.record import Record
from training_jobs.scenes import NODE, Attempts, Ended, Row, killed, paused

from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy

pytestmark = pytest.mark.timeout(300)  # the first test of a job waits for its end
STEPS = 80
# Here no other rank can finish the step; before the update all ranks wait for each other.
BEFORE = ("between", "forward", "collective", "backward", "reduced")
PLACES = (*BEFORE, "update", "updated", "last line", "snapshot", "before SnapshotTaken")


def killed_everywhere(first: int, *, loses: bool, **expected: Any) -> list[Row]:
    """Return a row for each place: a rank dies there, in the fourth step after a snapshot.

    A rank that dies while it takes a snapshot dies one step later.
    loses: whether the steps since the snapshot are lost.
    """
    rows = []
    for number, place in enumerate(PLACES):
        late = "napshot" in place
        step = first + 5 * number + late
        others = step if place in BEFORE else step + 1
        lost = ({5} if late else {3, 4}) if loses else {0}
        rows.append(killed(place, step, number % RANKS, others, lost=lost, **expected))
    return rows


def copies(job: Job) -> tuple[list[Path], dict[int, tuple[int, ...]]]:
    """Return the copies of other nodes' snapshots that the nodes have."""
    nodes = range(job.spec.nodes)
    return [path for node in nodes for path in buffers(job.agent_pid(node), COPIES)], job.copies()


def shards_in(checkpoint: Path) -> int:
    """Count the shards in a checkpoint."""
    return len(list(checkpoint.glob("state-*.safetensors")))


def test_shards_differ_and_replicas_do_not(baseline_of: Callable[..., Record]) -> None:
    """The tests below take this for granted of their script."""
    hybrid, sharded = (baseline_of(variant, steps=STEPS) for variant in ("hybrid", "sharded"))
    digests = [hybrid.result(rank)["digest"] for rank in range(RANKS)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]
    assert len({sharded.result(rank)["digest"] for rank in range(RANKS)}) == RANKS
    # The training is the same, however it is cut.
    assert hybrid.losses(3)[:24] == pytest.approx(sharded.losses(3)[:24], rel=1e-4)


# ---- with replicas

HYBRID = [
    *killed_everywhere(13, loses=False, sources={"self": RANKS - 1, "peer": 1}),
    paused("no copies", 67, copies, strategies=()),
    paused("all replicas of a shard", 72, kill(1, 3), strategies=None, lost=2, replaced={1, 3}),
    paused(
        "lost node",
        76,
        lose(1),
        strategies=NODE,
        replaced={2, 3},
        sources={"self": 2, "peer": 2},
    ),
]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Ended]:
    """Both nodes are lost; the next attempt meets the rows."""
    settings = {"variant": "hybrid", "nodes": 2, "steps": STEPS}
    both_lost = paused("both nodes lost", 12, lose_and_end(0, 1, checkpoint=10))
    with Attempts(tmp_path_factory.mktemp("hybrid"), **settings) as run:
        changes = {"snapshot_every": 0, "checkpoint_every": 5}
        first = run.meet(both_lost, replaces=False, **changes)
        first.seen["shards"] = [shards_in(path) for path in run.job.checkpoints()[:1]]
        changes = {"snapshot_every": 5, "checkpoint_every": 0}
        return first, run.meet(*HYBRID, **changes)


def test_checkpoint_holds_every_shard_once(hybrid: tuple[Ended, Ended]) -> None:
    """Several agents write it, one commits it, and another attempt begins with it."""
    first, second = hybrid
    first.check_outcome("stopped")
    assert first.seen["shards"] == [2]
    assert second.began() == (10, {"checkpoint": RANKS})


@pytest.mark.parametrize("row", HYBRID, ids=str)
def test_with_a_replica(row: Row, hybrid: tuple[Ended, Ended]) -> None:
    """The replica of the lost shard sends it: no step is lost, and no other rank is replaced."""
    hybrid[1].check(row)


def test_no_copies_of_replicas(hybrid: tuple[Ended, Ended]) -> None:
    """Another node has the replica of each shard."""
    assert hybrid[1].seen["no copies"] == ([], {})


def test_end_with_replicas(hybrid: tuple[Ended, Ended], baseline_of: Callable[..., Record]) -> None:
    """The job is the uninterrupted one, to the bit."""
    hybrid[1].check_end(baseline_of("hybrid", steps=STEPS))


# ---- without

SHARDED = [
    # Processes that have trained nothing yet begin again.
    Row(
        "before the first snapshot",
        3,
        (Fault(2, "forward", 3, life=0),),
        strategies=None,
        lost=None,
        replaced=range(RANKS),
        sources={"fresh": RANKS},
    ),
    *killed_everywhere(8, loses=True, sources={"snapshot": RANKS}),
    # It dies again while the shards are restored, and so does another one after that.
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
        sources={"snapshot": RANKS},
    ),
    paused("all ranks", 67, kill(*range(RANKS)), strategies=None, lost=2, replaced=range(RANKS)),
]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Attempts that end in all sorts of ways, with the rows between."""
    settings = {"variant": "sharded", "nodes": 2, "steps": STEPS}
    with Attempts(tmp_path_factory.mktemp("sharded"), **settings) as run:
        job, ended = run.job, {}
        ended["may shrink"] = run.meet(min_nodes=1)
        raises = Row("raises", 72, (Fault(1, "forward", 72, do="raise", life=0),))
        ended["rows"] = run.meet(*SHARDED, raises, min_nodes=0)
        ended["rows"].seen["checkpoints"] = [path.name for path in job.checkpoints()]

        own = environment(job.mark)
        replacement = len(job.record.lives(3)) + 2
        ended["another shard"] = run.meet(
            paused("no copies on one node", 72, copies, strategies=()),
            Row("killed", 75, (Fault(3, "forward", 74, life=0),)),
            nodes=1,
            processes_per_node=RANKS,
            environment=own | {"ANOTHER_SHARD": f"rank 3, life {replacement}"},
        )
        ended["no shards"] = run.meet(environment=own | {"WHOLE": "1"})

        kept = job.checkpoints()
        arguments = job.spec.arguments
        other = tuple({"sharded": "hybrid"}.get(each, each) for each in arguments)
        ended["other number"] = run.meet(environment=own, arguments=other)
        ended["other number"].seen["kept"] = job.checkpoints() == kept

        ended["end"] = run.meet(
            arguments=arguments,
            nodes=2,
            processes_per_node=RANKS // 2,
            snapshot_every=0,
            checkpoint_every=STEPS,
        )
        return ended


@pytest.mark.parametrize("row", SHARDED, ids=str)
def test_without_a_replica(row: Row, sharded: dict[str, Ended]) -> None:
    """All ranks load the newest step of which all shards have a snapshot; one rank is replaced."""
    sharded["rows"].check(row)


def test_a_world_that_may_shrink_is_refused(sharded: dict[str, Ended]) -> None:
    """The job fails before its first step, with a message that names the right option."""
    attempt = sharded["may shrink"]
    assert "run it with --nnodes=2, not with 1:2" in attempt.check_outcome("failed").reason
    assert attempt.incidents[-1].strategy is Strategy.FAIL


def test_last_words_of_shards(sharded: dict[str, Ended]) -> None:
    """A job that fails has the newest snapshots of all shards written as one checkpoint."""
    attempt = sharded["rows"]
    attempt.check_outcome("failed")
    [path] = attempt.seen["checkpoints"]
    assert path.startswith("step-0000000070")
    assert sharded["another shard"].began() == (70, {"checkpoint": RANKS})


def test_no_copies_on_one_node(sharded: dict[str, Ended]) -> None:
    """There is no other node that could keep them."""
    assert sharded["another shard"].seen["no copies on one node"] == ([], {})


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        ("another shard", "rank 3 has shard 0 of the training state, and had shard 3"),
        ("no shards", "rank 1 says that all ranks have the same training state"),
        (
            "other number",
            "has the state in 4 pieces, this job in 2, and what they are pieces of",
        ),
    ],
)
def test_shards_that_do_not_fit(attempt: str, said: str, sharded: dict[str, Ended]) -> None:
    """A job fails where a rank has another shard than before, or none, or one of fewer shards."""
    assert said in sharded[attempt].check_outcome("failed").reason


def test_a_checkpoint_that_does_not_fit_is_kept(sharded: dict[str, Ended]) -> None:
    """A job of fewer shards does not load it, and does not remove it."""
    assert sharded["other number"].seen["kept"]


def test_end_without_replicas(
    sharded: dict[str, Ended], baseline_of: Callable[..., Record]
) -> None:
    """The job is the uninterrupted one, to the bit, whatever became of its attempts."""
    assert sharded["end"].began() == (70, {"checkpoint": RANKS})
    sharded["end"].check_end(baseline_of("sharded", steps=STEPS))


def test_the_last_checkpoint_is_told_of(sharded: dict[str, Ended]) -> None:
    """The job does not end between the writing of its last shards and their commit."""
    attempt = sharded["end"]
    [written] = attempt.of(journal.Checkpointed)
    assert (written.step, written.path) == (STEPS, str(attempt.job.checkpoints()[0]))


# ---- one shard


def test_one_shard_by_another_number(tmp_path: Path) -> None:
    """The number of the only shard does not matter: a job finds its checkpoint again."""
    settings = {"variant": "one", "snapshot_every": 0, "checkpoint_every": 8, "steps": 16}
    with Attempts(tmp_path, **settings) as job:
        job.meet().check_outcome()
        arguments = (str(tmp_path), "--variant", "one", "--steps", "24")
        second = job.meet(arguments=arguments)
        second.check_outcome()
        assert second.began() == (16, {"checkpoint": RANKS})
