"""Ranks that should hold the same state compare it by digests."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import sources, strategies, take_over, trained

from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import StateDigest
from rekindle.recovery.faults.fault import Exit, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Policy, Replicas, Strategy
from rekindle.states import StateId

SAME = {"a.weight": 1, "b.weight": 2}
OTHER = SAME | {"b.weight": 3}


def beat(job: Driver, step: int, *values: int, generation: int = 1, item: int = 0) -> None:
    """Report the digests of the ranks 0, 1, ... after a step."""
    digests = {
        rank: (StateDigest(step, generation, item, value),) for rank, value in enumerate(values)
    }
    job.say(0, p.Heartbeat(finished={}, digests=digests))


def kept(job: Driver, *steps: int) -> None:
    """Let the agent keep snapshots of rank 0."""
    job.say(0, p.Snapshots(kept={0: tuple(StateId(step, 1) for step in steps)}))


def arrive(job: Driver, step: int, *tensors: dict[str, int]) -> None:
    """Let all ranks arrive with their states, and with the digests of their tensors."""
    for rank, own in enumerate(tensors):
        job.arrive([rank], step, tensors=own)


def differing(policy: Policy | None = None, *, snapshots: tuple[int, ...] = (6, 8)) -> Driver:
    """Return a job of three ranks, equal after step 7, in which rank 2 differs after step 9."""
    job = trained(5, processes=3, policy=policy)
    kept(job, *snapshots)
    beat(job, 7, 1, 1, 1)
    beat(job, 9, 1, 1, 2)
    return job


def test_equal_states_change_nothing() -> None:
    """Equal digests end no generation. The agents learn the step, to keep a snapshot."""
    job = trained(5, processes=3)
    beat(job, 7, 1, 1, 1)
    assert job.sent_by_node(p.StatesEqual)[0] == p.StatesEqual(step=7)
    beat(job, 8, 2, 2, 2)
    assert not job.commands  # agents are not told at every beat
    assert job.phase is Phase.TRAINING


def test_all_ranks_return_to_an_equal_state() -> None:
    """A difference ends the generation. Then all ranks return to a snapshot from before it.

    The incident names the rank that differs alone, the tensors and the steps.
    """
    job = differing()
    over = job.sent_by_node(p.GenerationEnded)[0]
    assert (over.compare, over.cause) == (StateId(9, 1), p.Cause(kind="replicas", ranks=(0, 1, 2)))
    arrive(job, 9, SAME, SAME, OTHER)
    assert strategies(job) == [Strategy.RETRY]
    fault = job.last(journal.FaultSeen).fault
    assert (fault.kind, fault.rank, fault.signature) == (FaultKind.REPLICAS, 2, "b.weight")
    assert "rank 2 holds another state than ranks 0, 1 after step 9 (b.weight)" in fault.message
    assert "steps 8 to 9 may be wrong on all ranks" in fault.message
    assert job.last(journal.Formed).step == 6
    assert sources(job) == {
        0: StateSource.SNAPSHOT,
        1: StateSource.PEER,
        2: StateSource.PEER,
    }
    assert job.last(journal.Suspected).valid_steps == 7


def test_the_same_tensors_differ_again() -> None:
    """The second time for the same tensors ends the job."""
    job = differing()
    arrive(job, 9, SAME, SAME, OTHER)
    job.ready(job.ranks)
    job.step(7)
    beat(job, 9, 1, 1, 2)  # late digests of the states that the ranks have left
    assert job.phase is Phase.TRAINING
    beat(job, 8, 1, 1, 2, generation=2)
    arrive(job, 8, SAME, SAME, OTHER)
    assert strategies(job)[-1] in (Strategy.DUMP, Strategy.FAIL)
    assert "the same tensors differ again" in job.last(journal.Decided).reason


def test_nothing_is_from_before_the_difference() -> None:
    """Without an older state the job ends, and writes no final checkpoint of a wrong state."""
    job = differing(snapshots=(8,))
    arrive(job, 9, SAME, SAME, OTHER)
    assert strategies(job) == [Strategy.FAIL]
    assert "no snapshot or checkpoint is from before that" in job.last(journal.Decided).reason


def test_no_comparison_was_equal() -> None:
    """States that differ from the first step on end the job; the text names the remedy."""
    job = trained(1)
    beat(job, 1, 1, 2)
    arrive(job, 1, SAME, OTHER)
    assert strategies(job) == [Strategy.FAIL]
    reason = job.last(journal.Decided).reason
    assert "ranks 0, 1 hold different states after step 1 (b.weight)" in reason
    assert "no earlier comparison was equal" in reason
    assert "shard=" in reason


def test_the_last_digest_of_a_dead_rank_counts() -> None:
    """A new process takes no state of ranks that differ from the dead rank."""
    job = trained(5, processes=2)
    kept(job, 6, 8)
    beat(job, 7, 1, 1)
    digest = StateDigest(9, 1, 0, 2)
    exited = p.Exited(
        rank=1, pid=job.pids.pop(1), exit=Exit(signal=9), finished=9, digests=(digest,)
    )
    job.say(0, exited)
    job.spawned()
    job.arrive([0], 9, digests=(StateDigest(9, 1, 0, 1),))
    job.arrive([1])
    assert job.sent_by_node(p.GenerationEnded)[0].compare == StateId(9, 1)
    job.arrive([0], 9, tensors=SAME)
    job.arrive([1])
    assert job.last(journal.FaultSeen).fault.kind is FaultKind.REPLICAS
    assert job.last(journal.Formed).step == 6


def test_states_that_differ_at_the_end() -> None:
    """Ranks whose last states differ do not end with success."""
    job = trained(5)
    for rank, value in enumerate((1, 2)):
        job.arrive([rank], 9, done=True, digests=(StateDigest(9, 1, 0, value),))
    assert not job.sent(p.EndSession)
    assert job.sent_by_node(p.GenerationEnded)[0].compare == StateId(9, 1)
    job.arrive([0], 9, tensors=SAME)  # the arrival of rank 1 was under way
    arrive(job, 9, SAME, OTHER)
    assert job.last(journal.FaultSeen).fault.signature == "b.weight"


def test_ranks_of_other_groups_hold_other_states() -> None:
    """Only ranks of one group must agree."""
    job = Driver(processes=4)
    job.start()
    for rank in job.ranks:
        job.arrive([rank], shard=rank % 2, replicas=rank % 2)
    job.ready(job.ranks)
    job.step(1)
    beat(job, 1, 1, 2, 1, 2)
    assert job.phase is Phase.TRAINING
    beat(job, 2, 1, 2, 3, 2)
    assert job.phase is Phase.REGROUPING


def test_a_policy_that_only_warns() -> None:
    """With `warn` the journal gets one event, until a process must be replaced."""
    job = differing(Policy(max_restarts=0, replicas=Replicas.WARN))
    beat(job, 10, 1, 1, 2)
    assert job.phase is Phase.TRAINING
    (event,) = job.recorded(journal.RanksDiffer)
    assert (event.step, event.ranks) == (9, (0, 1, 2))
    job.exits(1, signal=9)
    job.spawned()
    job.arrive([0], 10)
    job.arrive([1])
    job.arrive([2], 10)
    job.arrive([0], 10, tensors=SAME)
    job.arrive([1])
    job.arrive([2], 10, tensors=OTHER)
    assert job.last(journal.FaultSeen).fault.kind is FaultKind.REPLICAS


def test_a_policy_that_fails() -> None:
    """With `fail` the job ends at the first difference."""
    job = differing(Policy(max_restarts=0, replicas=Replicas.FAIL))
    arrive(job, 9, SAME, SAME, OTHER)
    assert strategies(job)[-1] in (Strategy.DUMP, Strategy.FAIL)


def test_other_objects_that_differ() -> None:
    """A difference of another object is recorded once, by its name, and training continues."""
    job = Driver(processes=2)
    job.start()
    job.arrive(job.ranks, items=("the values", "meter"))
    job.ready(job.ranks)
    job.step(1)
    for step in (1, 2):
        beat(job, step, 7, 7, item=1)
        beat(job, step, 1, 2, item=2)
    (event,) = job.recorded(journal.RanksDiffer)
    assert (event.item, event.step) == ("meter", 1)
    assert job.phase is Phase.TRAINING


@pytest.mark.parametrize("values", [(1, 1), (1, 2)])
def test_a_new_coordinator_compares_again(values: tuple[int, int]) -> None:
    """After a takeover the agents send the digests of their ranks again."""
    job = trained(5)
    take_over(job)
    beat(job, 5, *values)
    arrive(job, 5, SAME, SAME)
    kinds = [event.fault.kind for event in job.recorded(journal.FaultSeen)]
    assert (FaultKind.REPLICAS in kinds) == (values != (1, 1))
