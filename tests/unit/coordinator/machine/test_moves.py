"""Planned moves: a prepared spare takes the place of a node that still works."""

from __future__ import annotations

from typing import Any

import pytest
from jobs.driver import Driver
from jobs.moving import Moving

from rekindle.coordinator.machine.job_state import Phase
from rekindle.coordinator.machine.roster import Status
from rekindle.names import SPARE
from rekindle.protocol import agent as p
from rekindle.protocol.http_views import Drain
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.fault import Exit, FaultKind
from rekindle.recovery.faults.tables.verdict import Urgency
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.states import StateId


def test_a_node_moves() -> None:
    """The spare starts the ranks, the world pauses, the spare becomes the node, the agent ends."""
    job = Moving()
    old = job.nodes[1]
    assert job.drain() == ""
    (prepare,) = job.sent(p.Prepare)
    assert (prepare.connection, prepare.message.node) == (job.spare, 1)
    assert prepare.message.spawn.ranks == (1,)
    job.prepare()
    assert job.sent(p.PauseRequest)
    job.pause()
    assert [(each.connection, each.message.node) for each in job.sent(p.Promote)] == [
        (job.spare, 1)
    ]
    assert job.status(1) is Status.ABSENT
    assert not job.sent(p.EndAgent)
    job.take_place()
    job.ready(job.ranks)
    assert not job.recorded(journal.NodeWanted)
    job.step(2)
    assert [each.connection for each in job.sent(p.EndAgent)] == [old]
    assert [event.node for event in job.recorded(journal.NodeWanted)] == [SPARE]
    incident = job.incident()
    assert incident.planned
    assert incident.closed
    assert incident.steps_lost == 0
    assert incident.sources == {"self": 1, "peer": 1}
    assert incident.strategies == []
    assert not job.recorded(journal.FaultSeen)
    assert not job.recorded(journal.Decided)


@pytest.mark.parametrize(
    ("node", "deadline_s", "text"),
    [
        (2, 0.0, "the job has no node 2; its nodes are 0 to 1"),
        (-1, 0.0, "the job has no node -1; its nodes are 0 to 1"),
        (1, -1.0, "a deadline of -1 s is invalid; give 0 or more seconds"),
    ],
)
def test_bad_orders(node: int, deadline_s: float, text: str) -> None:
    """An order with a bad value is refused with one line."""
    assert Moving().drain(node, deadline_s) == text


def test_a_second_order() -> None:
    """A node that is to move already cannot be drained again."""
    job = Moving()
    job.drain()
    assert job.drain() == "node 1 is to move already"


def test_an_ending_job() -> None:
    """An ending job refuses a move."""
    job = Moving()
    job.stop()
    assert job.drain() == "the job is ending"


def test_a_lost_node() -> None:
    """A node without an agent cannot move."""
    job = Moving(spares=0)
    job.lose(1)
    assert job.drain() == "node 1 has no agent now"


def test_before_a_session() -> None:
    """A node cannot move before its ranks have a Session."""
    job = Driver(nodes=2, processes=1)
    job.start()
    refused = job.machine.moves.drain(Drain(node=1, by="test"), job.now)
    assert refused.startswith("no rank has reached a Session yet")


def test_the_only_holder_of_a_shard() -> None:
    """A node that alone holds a shard of the state cannot move."""
    job = Driver(nodes=2, processes=1)
    job.start()
    for rank in job.ranks:
        job.arrive([rank], shard=rank)
    job.ready(job.ranks)
    job.step(1)
    refused = job.machine.moves.drain(Drain(node=1, by="test"), job.now)
    assert refused == "only node 1 holds the training state of its ranks, so it cannot move"


OWN = {"own": (StateId(1, 1), StateId(0, 0))}


def moved_with_own_state() -> Moving:
    """Return a job whose node 1 has left its place, and whose ranks have a state of their own."""
    job = Moving()
    job.drain()
    job.prepare(own=())
    job.leave()
    job.arrive(job.ranks, 1, **OWN)
    assert job.promoted() == [(job.spare, 1)]
    return job


def test_ranks_take_their_own_state_from_the_earlier_agent() -> None:
    """What a rank shares with no other is still in the agent that has left, and no step is lost."""
    job = moved_with_own_state()
    job.take_place(own=())
    forms = job.sent_by_node(p.FormGeneration)
    assert (forms[1].step, forms[1].plan[1].source) == (1, StateSource.PEER)
    assert forms[1].former == p.ReplicaAddress(host="10.0.0.1", port=0)
    assert forms[0].former is None
    job.ready(job.ranks)
    job.step(2)
    assert job.incident().steps_lost == 0


def test_a_lost_agent_takes_the_own_state_of_its_ranks_with_it() -> None:
    """If the earlier agent ends too early, no rank continues with the state of another one."""
    job = moved_with_own_state()
    (former,) = job.machine.job.roster.leaving
    job.lose_spare(former)
    job.take_place(own=())
    assert not job.sent(p.FormGeneration)
    assert [each.message.ranks for each in job.sent(p.Kill)] == [(0,)]  # all begin again


def test_a_failed_transfer_of_the_own_state() -> None:
    """After a failure the next plan does not count on the same copy."""
    job = moved_with_own_state()
    job.take_place(own=())
    job.ready([0])
    job.ready([1], error="the agent does not answer")
    assert job.last(journal.FaultSeen).fault.kind is FaultKind.RESTORE


def test_without_a_spare() -> None:
    """Without a spare the job asks for one, and prepares it when it comes."""
    job = Moving(spares=0)
    job.drain()
    assert [event.node for event in job.recorded(journal.NodeWanted)] == [SPARE]
    job.spare = job.hello(spare=True)
    assert job.sent(p.Prepare)
    assert [event.node for event in job.recorded(journal.NodeWanted)] == [SPARE]


def test_the_spare_is_lost() -> None:
    """If the spare is lost while it prepares, the next one prepares."""
    job = Moving()
    job.drain()
    job.lose_spare(job.spare)
    assert not job.sent(p.Prepare)
    job.spare = job.hello(spare=True)
    assert job.sent(p.Prepare)
    job.prepare()
    assert job.sent(p.PauseRequest)


def test_a_rank_that_does_not_start_on_the_spare() -> None:
    """A spare whose rank ends is dismissed. After max_in_row others the move is given up."""
    job = Moving()
    job.drain()
    most = job.machine.job.spec.policy.max_in_row
    for _ in range(most):
        job.tell(p.SpawnFailed(rank=1, error="no memory"))
        assert [each.connection for each in job.sent(p.EndAgent)] == [job.spare]
        job.spare = job.hello(spare=True)
        assert job.sent(p.Prepare)
    job.tell(p.Exited(rank=1, pid=901, exit=Exit(code=1), finished=0))
    ended = job.last(journal.MoveEnded)
    assert ended.reason.startswith(f"{most + 1} spares could not take its place")
    assert job.incident().closed
    assert job.phase is Phase.TRAINING


def test_the_node_is_lost_first() -> None:
    """If the node is lost first, the prepared spare replaces it, and that ends the move."""
    job = Moving()
    job.drain()
    job.prepare()
    job.lose(1)
    assert [(each.connection, each.message.node) for each in job.sent(p.Promote)] == [
        (job.spare, 1)
    ]
    assert "a spare replaces it" in job.last(journal.Decided).reason
    job.arrive([0], 1)
    job.take_place()
    job.ready(job.ranks)
    job.step(2)
    assert [each.closed for each in journal.incidents(job.history)] == [True, True]
    assert job.machine.moves._moves == {}


def test_two_moves_at_once() -> None:
    """Two nodes that hold the only copies of a state move one after the other."""
    job = Moving(spares=2)
    job.drain(0)
    first = job.sent(p.Prepare)[0].connection
    job.drain(1)
    second = job.sent(p.Prepare)[0].connection
    assert {first, second} == {job.spare, job.spare - 1}
    for job.spare, node in ((first, 0), (second, 1)):
        job.prepare(node)
    job.pause()
    assert [each.message.node for each in job.sent(p.Promote)] == [0]
    job.spare = first
    job.take_place(0)
    job.store_up()
    job.ready(job.ranks)
    job.step_of([0], 2)
    job.step_of([1], 2)
    assert job.sent(p.PauseRequest)
    job.pause(2)
    assert [each.message.node for each in job.sent(p.Promote)] == [1]


def test_a_torn_rank_elsewhere_delays_the_move() -> None:
    """The node stays if it alone holds a whole state when all ranks wait."""
    job = Moving()
    job.drain()
    job.prepare()
    job.say(0, p.Paused(rank=0, generation=1, finished=1))
    job.arrive([0], 1, torn=True)
    job.arrive([1], 1)
    assert not job.sent(p.Promote)
    assert job.sent(p.FormGeneration)


def test_a_deadline() -> None:
    """At the deadline the ranks write a checkpoint once, and the move goes on."""
    job = Moving(spares=0, checkpoint_every=50)
    job.drain(deadline_s=30.0)
    assert job.timers["move"] == 30.0
    job.fire("move")
    assert {each.message.checkpoint_every for each in job.sent(p.Settings)} == {1}
    assert job.last(journal.MoveLate).node == 1
    job.say(0, p.CheckpointWritten(step=3, generation=1, path="there"))
    assert {each.message.checkpoint_every for each in job.sent(p.Settings)} == {50}
    job.spare = job.hello(spare=True)
    assert job.sent(p.Prepare)


def test_a_takeover() -> None:
    """A new coordinator continues the move with the spare that has prepared it."""
    job = Moving()
    job.drain()
    job.prepare()
    old = {n: job.machine.job.roster.nodes[n] for n in (0, 1)}
    job.lose_coordinator()
    live = (p.LiveRank(rank=1, pid=901, training=True),)
    job.spare = job.hello(1, spare=True, prepared=True, ranks=live)
    assert list(job.machine.job.roster.nodes) == []
    for node, agent in old.items():
        ranks = (p.LiveRank(rank=node, pid=job.pids[node], training=True),)
        job.hello(
            node, address=agent.address, pid=agent.pid, host=agent.host, ranks=ranks, generation=1
        )
    job.tell(p.Arrived(rank=1, generation=0))
    job.store_up()
    job.arrive(job.ranks, 1, generation=1, state_generation=1)
    assert job.sent(p.Promote)
    job.take_place()
    job.ready(job.ranks)
    job.step(2)
    planned = [each for each in journal.incidents(job.history) if each.planned]
    assert [each.closed for each in planned] == [True]
    assert job.recorded(journal.FaultSeen)[-1].fault.kind is FaultKind.COORDINATOR


def test_an_agent_that_left_does_not_return() -> None:
    """After a move and a takeover, the agent that left is refused."""
    job = Moving()
    agent = job.machine.job.roster.nodes[1]
    job.drain()
    job.prepare()
    job.pause()
    job.take_place()
    job.lose_coordinator()
    live = (p.LiveRank(rank=1, pid=101, training=True),)
    job.hello(1, address=agent.address, pid=agent.pid, ranks=live, generation=1)
    assert job.refusals() == ["another agent has taken the place of node 1"]


def notice(job: Moving, **fields: Any) -> str:
    """Deliver a notice of the platform. Return why it is refused, or an empty text."""
    event = HealthEvent(source=EventSource.NOTICE, what="spot interruption", by="test", **fields)
    refused = job.machine.health.on_health_event(event, job.now)
    job.collect()
    return refused


def test_a_notice_for_a_host() -> None:
    """A notice with the name of a host moves the nodes on it, with its deadline."""
    job = Moving()
    host = job.machine.job.roster.nodes[1].host
    assert notice(job, host=host, within_s=120.0) == ""
    assert [each.message.node for each in job.sent(p.Prepare)] == [1]
    requested = job.last(journal.MoveRequested)
    assert requested.deadline == job.now + 120.0
    assert "the platform announces the end of the host: spot" in requested.fault.message
    assert job.last(journal.HealthEventSeen).urgency is Urgency.SOON
    assert job.phase is Phase.TRAINING


def test_a_notice_for_an_unknown_host() -> None:
    """A notice for a host without a node of the job is refused."""
    assert notice(Moving(), host="elsewhere") == "the job has no node on host elsewhere now"


def test_a_notice_for_a_node_that_cannot_move() -> None:
    """A notice that has no effect says why."""
    job = Moving()
    job.drain()
    assert notice(job, node=1) == "node 1 is to move already"


def test_an_isolation_that_can_wait() -> None:
    """A health event of urgency later isolates the host, and the node moves away from it."""
    job = Moving()
    event = HealthEvent(source=EventSource.NODE_CONDITION, what="ReadonlyFilesystem=True", node=1)
    job.machine.health.on_health_event(event, job.now)
    job.collect()
    assert job.last(journal.Isolated).node == 1
    assert [each.message.node for each in job.sent(p.Prepare)] == [1]


def test_the_job_ends_first() -> None:
    """A move that is not over when the job ends is closed, with that reason."""
    job = Moving()
    job.drain()
    job.stop()
    for rank in job.ranks:
        job.exits(rank, signal=15)
    incident = job.incident()
    assert incident.closed
    assert incident.reason.endswith("; the attempt ended first")
