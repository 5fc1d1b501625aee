"""Nodes that become slow while the job trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jobs.checked import timings
from jobs.driver import Driver
from jobs.elastic import hold
from jobs.trained import SIGKILL, strategies

from rekindle.coordinator.machine.job_state import Phase
from rekindle.profiling.findings import Slow
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.stragglers import Examined, Slowed, SlowOver
from rekindle.recovery.journal import journal
from rekindle.recovery.node_check.verdicts import Health, NodeVerdict
from rekindle.recovery.policy.policy import Policy, Stragglers, Strategy
from rekindle.reporting.summary import Precision, precision

REPLACE = Policy(stragglers=Stragglers.REPLACE)
SLOW = 1  # the slow node of four


def tell(
    job: Driver, first: int, count: int, factor: float = 1.0, *, slow: tuple[int, ...] = (SLOW,)
) -> None:
    """Let all connected agents report step times, which are longer on slow nodes."""
    for node in sorted(job.machine.job.roster.nodes):
        work = 0.05 * (factor if node in slow else 1.0)
        job.say(node, timings(job, node, range(first, first + count), work))


def begun(
    policy: Policy,
    *,
    spares: int = 0,
    shard: Callable[[int], int | None] = lambda rank: None,
    **world: object,
) -> Driver:
    """Return a job of four nodes that trains. shard: returns the shard of a rank."""
    job = Driver(nodes=4, policy=policy, spares=spares, **world)
    for node in range(4):
        job.hello(node, host=f"host-{node}")
    for _ in range(spares):
        job.hello(-1, spare=True, host="host-spare")
    job.store_up()
    job.spawned()
    for rank in job.ranks:
        job.arrive([rank], shard=shard(rank))
    job.ready(job.ranks)
    job.step(1)
    return job


def slowed(policy: Policy, factor: float = 1.5, spares: int = 1, **world: object) -> Driver:
    """Let one of four nodes become slow, and return the job."""
    job = begun(policy, spares=spares, **world)
    tell(job, 1, 30)
    assert not job.recorded(Slowed)
    tell(job, 31, 30, factor)
    return job


def examined(job: Driver, **sick: Health) -> None:
    """Answer the running check with these verdicts. All other nodes are healthy."""
    nodes = job.examinations[-1]
    found = {
        node: NodeVerdict(node=node, health=sick.get(f"node{node}", Health.HEALTHY), reason="mm")
        for node in nodes
    }
    job.machine.stragglers.on_examined(found, job.now)
    job.collect()


def stand(job: Driver) -> None:
    """Let all ranks stop between two steps."""
    hold(job)
    job.arrive(job.ranks, finished=60)


def test_a_slow_node_is_said_to_be_so() -> None:
    """By default, a slow node is only recorded."""
    job = slowed(Policy())
    (straggler,) = job.recorded(Slowed)
    assert (straggler.finding.kind, straggler.nodes, straggler.hosts) == (
        Slow.NODE,
        (SLOW,),
        ("host-1",),
    )
    assert 1.3 < straggler.finding.factor < 1.7
    assert not job.sent(p.PauseRequest)
    assert "computes 1.5 times as long" in straggler.in_words()


def test_it_is_checked_beside_reference_and_replaced() -> None:
    """A slow node is checked together with reference nodes between two steps, then replaced.

    No step is lost, and a spare replaces it.
    """
    job = slowed(REPLACE)
    stand(job)
    assert job.examinations == [(SLOW, 0, 2)]
    assert not job.sent_by_node(p.FormGeneration), (
        "training goes on before it is known how the node is"
    )
    examined(job, node1=Health.STRAGGLER)
    assert strategies(job) == [Strategy.RECOVER]
    fault = job.recorded(journal.FaultSeen)[0].fault
    assert (fault.kind, fault.node, fault.host) == (FaultKind.STRAGGLER, SLOW, "host-1")
    assert job.last(journal.Isolated).host == "host-1"
    assert [node for _, node in job.promotions] == [SLOW]
    assert [each.suspect for each in job.recorded(Examined)] == [False, True, False]
    assert precision(job.history) == Precision(right=1)


def test_a_node_that_is_healthy_stays() -> None:
    """If the check finds the node healthy, all processes continue, and the finding was wrong."""
    job = slowed(REPLACE)
    stand(job)
    examined(job)
    assert len(job.sent_by_node(p.FormGeneration)) == 4
    assert not job.recorded(journal.Decided)
    job.ready(job.ranks)
    job.step(61)
    tell(job, 61, 30, 1.5)
    assert not job.sent(p.PauseRequest), "it is checked again and again"
    assert precision(job.history) == Precision(wrong=1)


def test_a_healthy_node_that_becomes_slower_is_checked_again() -> None:
    """A mild slowness that lasts does not hide a severe one of the same node."""
    job = slowed(REPLACE, 1.2)
    stand(job)
    examined(job)
    job.ready(job.ranks)
    job.step(61)
    tell(job, 61, 30, 1.2)
    assert job.examinations == [(SLOW, 0, 2)]
    tell(job, 91, 60, 4.0)
    mild, severe = job.recorded(Slowed)
    assert severe.hosts == mild.hosts
    assert severe.finding.factor > 3
    hold(job)
    job.arrive(job.ranks, finished=150)
    assert job.examinations == [(SLOW, 0, 2)] * 2
    examined(job, node1=Health.STRAGGLER)
    assert strategies(job) == [Strategy.RECOVER]


def test_a_reference_that_is_sick_is_replaced_as_well() -> None:
    job = slowed(REPLACE, spares=2)
    stand(job)
    examined(job, node1=Health.STRAGGLER, node2=Health.FAULTY)
    assert sorted(node for _, node in job.promotions) == [1, 2]


def test_in_shadow_mode_nothing_is_done() -> None:
    """In shadow mode, the journal states what the job would do, and training continues."""
    job = slowed(Policy(stragglers=Stragglers.REPLACE, stragglers_shadow=True))
    (straggler,) = job.recorded(Slowed)
    assert straggler.would
    assert "in shadow mode: the job pauses training" in straggler.in_words()
    assert not job.sent(p.PauseRequest)


def test_isolate_waits_for_the_next_time_that_all_wait() -> None:
    """With `isolate`, the slow node is checked at the next regroup, whatever caused the regroup."""
    job = slowed(Policy(stragglers=Stragglers.ISOLATE))
    assert not job.sent(p.PauseRequest)
    job.exits(7, signal=SIGKILL)
    job.arrive([0, 1, 2, 3, 4, 5, 6], finished=60)
    job.spawned()
    assert not job.examinations
    job.arrive([7])
    assert job.examinations == [(SLOW, 0, 2)]
    examined(job, node1=Health.STRAGGLER)
    assert strategies(job) == [Strategy.RECOVER_IN_PLACE, Strategy.RECOVER]


def test_what_passes_by_itself_is_no_reason() -> None:
    job = slowed(Policy(stragglers=Stragglers.ISOLATE))
    tell(job, 61, 60)
    assert len(job.recorded(SlowOver)) == 1
    job.exits(7, signal=SIGKILL)
    job.arrive([0, 1, 2, 3, 4, 5, 6], finished=60)
    job.spawned()
    job.arrive([7])
    assert not job.examinations
    assert precision(job.history) == Precision(wrong=1)


def test_uneven_work_is_never_checked() -> None:
    """A rank with more work since the start of the records has a larger part of the model.

    Its node is not faulty and is not checked.
    """
    job = begun(REPLACE)
    tell(job, 1, 80, 1.5)
    (straggler,) = job.recorded(Slowed)
    assert (straggler.finding.kind, straggler.finding.ranks) == (Slow.UNEVEN, (2, 3))
    assert (
        "1.5 times the work of its peers since records began; the node is not faulty"
        in straggler.in_words()
    )
    assert not job.sent(p.PauseRequest)
    assert precision(job.history) == Precision()


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (
            Policy(stragglers=Stragglers.REPLACE, strategies=(Strategy.RESTART,)),
            "the job does nothing, because",
        ),
        (Policy(stragglers=Stragglers.REPLACE, max_recoveries=0), "the job does nothing, because"),
    ],
)
def test_training_is_not_held_where_nobody_could_be_replaced(policy: Policy, why: str) -> None:
    job = slowed(policy, spares=0)
    (straggler,) = job.recorded(Slowed)
    assert why in straggler.then
    assert not job.sent(p.PauseRequest)


@pytest.mark.parametrize("slow", [(0, 1), (0, 1, 2)])
def test_half_of_all_may_be_slow(slow: tuple[int, ...]) -> None:
    """If more than half of the nodes slow down, no check follows.

    The records do not show which nodes have changed.
    """
    job = begun(REPLACE)
    tell(job, 1, 30)
    tell(job, 31, 30, 1.5, slow=slow)
    assert bool(job.sent(p.PauseRequest)) == (len(slow) == 2)


def test_ranks_of_a_shard_that_all_have_more_to_do_are_uneven() -> None:
    """If all ranks of a shard get more work, the work is uneven, and no node is checked.

    They do the same work, for example the last stage of a pipeline.
    """
    job = begun(REPLACE, shard=lambda rank: rank // 2)
    tell(job, 1, 60)
    tell(job, 61, 40, 1.3)
    (straggler,) = job.recorded(Slowed)
    assert (straggler.finding.kind, straggler.finding.ranks) == (Slow.UNEVEN, (2, 3))
    assert "since step 61; the node is not faulty" in straggler.in_words()
    assert not job.sent(p.PauseRequest)


@pytest.mark.parametrize("shard", [lambda rank: rank, lambda rank: rank % 2])
def test_a_slow_node_of_shards_is_checked(shard: Callable[[int], int]) -> None:
    """A slow node is checked with a shard per rank (FSDP), and with replicas on other nodes."""
    job = begun(REPLACE, shard=shard, spares=1)
    tell(job, 1, 30)
    tell(job, 31, 30, 1.5)
    (straggler,) = job.recorded(Slowed)
    assert (straggler.finding.kind, straggler.nodes) == (Slow.NODE, (SLOW,))
    assert job.sent(p.PauseRequest)


def test_a_slow_node_stays_one_when_another_is_replaced() -> None:
    """If another node is replaced, the slow node keeps its records, and the finding stays."""
    job = slowed(Policy())
    job.lose(3)
    job.hello(3, host="host-spare")
    job.killed()
    job.arrive(job.ranks, finished=60)
    job.ready(job.ranks)
    job.step(61)
    tell(job, 61, 90, 1.5)
    (straggler,) = job.recorded(Slowed)
    assert (straggler.finding.kind, straggler.nodes) == (Slow.NODE, (SLOW,))
    assert not job.recorded(SlowOver)


def test_a_slow_node_that_is_replaced_is_another_one() -> None:
    """A replaced node starts without the finding of the old node, and its own slowdown is found."""
    job = slowed(Policy())
    job.lose(SLOW)
    job.hello(SLOW, host="host-spare")
    job.killed()
    job.arrive(job.ranks, finished=60)
    job.ready(job.ranks)
    job.step(61)
    tell(job, 61, 60)
    tell(job, 121, 40, 1.5)
    assert [each.hosts for each in job.recorded(Slowed)] == [("host-1",), ("host-spare",)]


def test_a_node_that_is_lost_while_it_is_checked() -> None:
    """If a node is lost during its check, its replacement trains without a verdict."""
    job = slowed(REPLACE)
    stand(job)
    job.lose(SLOW)
    assert strategies(job) == [Strategy.RECOVER]
    job.machine.stragglers.on_examined({0: NodeVerdict(node=0, health=Health.HEALTHY)}, job.now)
    job.collect()
    assert job.phase is Phase.REGROUPING


def test_the_job_ends_meanwhile() -> None:
    job = slowed(REPLACE)
    stand(job)
    job.stop()
    examined(job, node1=Health.STRAGGLER)
    assert not job.recorded(journal.Decided)


def test_another_coordinator_forgets_what_was_slow() -> None:
    """A new coordinator does not continue the check. It finds slow nodes from new step times."""
    job = slowed(REPLACE)
    stand(job)
    before = list(job.examinations)
    job.lose_coordinator()
    assert job.examinations == before


def test_first_times_of_a_generation_that_has_ended() -> None:
    """The machine ignores the first times of a generation that a lost node has ended.

    The remaining nodes alone would show a slow node in the middle of the recovery.
    """
    job = begun(Policy(stragglers=Stragglers.ISOLATE), least=2)
    job.lose(3)
    assert job.phase is Phase.REGROUPING
    tell(job, 1, 30)
    tell(job, 31, 30, 1.5)
    assert not job.recorded(Slowed)
