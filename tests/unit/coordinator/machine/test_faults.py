"""Faults that overlap: a second fault, lost nodes, another coordinator."""

from __future__ import annotations

import pytest
from jobs.driver import Driver
from jobs.trained import SIGKILL, sources, strategies, take_over, trained

from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Policy, Strategy

# ---- a second fault during a recovery


def test_a_second_rank_dies_while_regrouping() -> None:
    """A second rank that dies joins the incident and restarts, and one generation forms."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([1], finished=5)
    job.exits(1, signal=SIGKILL, finished=5)
    assert job.spawned_now() == [1]
    job.spawned()
    job.arrive([0, 1])
    job.arrive([2], finished=5)
    assert sources(job) == {0: StateSource.PEER, 1: StateSource.PEER, 2: StateSource.SELF}
    assert job.last(journal.Formed).generation == 2
    assert len(journal.incidents(job.history)) == 1


def test_the_new_rank_dies_before_it_arrives() -> None:
    """If the new process of a rank dies before it arrives, the agent starts another."""
    job = trained(5)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.exits(0, signal=SIGKILL, finished=5)
    assert job.spawned_now() == [0]


def test_a_second_rank_dies_while_restoring() -> None:
    """A death during restore ends the new generation, and the next plan excludes the dead rank."""
    job = trained(5, processes=3)
    job.exits(0, signal=SIGKILL, finished=5)
    job.spawned()
    job.arrive([0])
    job.arrive([1, 2], finished=5)
    job.ready([2])
    job.exits(1, signal=SIGKILL, finished=5)
    assert job.sent_by_node(p.GenerationEnded)[0].generation == 2
    assert job.spawned_now() == [1]
    job.spawned()
    job.arrive([0, 1])
    job.arrive([2], finished=5)
    assert sources(job) == {0: StateSource.PEER, 1: StateSource.PEER, 2: StateSource.SELF}
    assert job.sent_by_node(p.FormGeneration)[0].generation == 3


def test_a_recovery_that_never_gets_to_a_step_ends_the_job() -> None:
    """If a rank always dies before its step, another node tries once. Then the job fails."""
    job = trained(5)
    for _ in range(3):
        job.exits(0, signal=SIGKILL, finished=5)
        job.spawned()
    job.exits(0, signal=SIGKILL, finished=5)
    assert strategies(job) == [*[Strategy.RECOVER_IN_PLACE] * 3, Strategy.RECOVER]
    job.killed()
    job.hello(0)
    job.store_up()
    job.spawned()
    job.exits(0, signal=SIGKILL, finished=5)
    assert strategies(job)[-1] is Strategy.FAIL
    assert job.phase is Phase.STOPPING


# ---- nodes


def test_a_lost_node_is_replaced_and_the_healthy_ranks_wait() -> None:
    """Ranks of a lost node start on the new agent with live state, while the healthy ranks wait."""
    job = trained(5, nodes=2, processes=2)
    job.lose(1)
    cause = p.Cause(kind="node-lost", ranks=(2, 3))
    assert job.sent_by_node(p.GenerationEnded) == {
        0: p.GenerationEnded(generation=1, finished=5, process_lost=True, cause=cause)
    }
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [1]
    assert strategies(job) == [Strategy.RECOVER]
    assert "node" in job.timers
    assert not job.spawned_now()
    job.arrive([0, 1], finished=5)
    job.hello(1)
    assert job.spawned_now() == [2, 3]
    assert "node" not in job.timers
    job.spawned()
    job.arrive([2, 3])
    assert sources(job) == dict.fromkeys((0, 1), StateSource.SELF) | dict.fromkeys(
        (2, 3), StateSource.PEER
    )


def test_the_node_of_the_store_is_lost() -> None:
    """If the node of the store is lost, another node hosts a new store for the next generation."""
    job = trained(5, nodes=2, processes=1)
    job.lose(0)
    assert list(job.sent_by_node(p.HostStore)) == [1]
    job.store_up(port=4713)
    job.hello(0)
    job.spawned()
    job.arrive([0])
    job.arrive([1], finished=5)
    form = job.sent_by_node(p.FormGeneration)[1]
    assert (form.store_host, form.store_port) == ("10.0.0.1", 4713)


def test_a_dead_store_is_replaced_when_the_next_generation_needs_it() -> None:
    """Ranks that train do not need the store. The next fault requests a new one."""
    job = trained(5)
    job.say(0, p.StoreDown(serial=1))
    assert not job.commands
    job.exits(0, signal=SIGKILL, finished=5)
    assert job.sent_by_node(p.HostStore)[0].serial == 2
    assert not job.spawned_now()
    job.store_up(port=4714)
    assert job.spawned_now() == [0]


def test_a_store_that_cannot_listen_fails_the_job() -> None:
    """If the master port is in use, the reason states it, and no rank starts."""
    job = Driver()
    job.hello(0)
    job.store_up(port=0, error="port 29500: Address already in use")
    assert job.outcome is False
    assert "Address already in use" in job.last(journal.Ended).reason


def test_all_nodes_are_lost_and_come_back() -> None:
    """If all nodes are lost, all ranks start on their nodes again from the newest checkpoint."""
    job = trained(5, nodes=2, processes=1)
    job.say(0, p.CheckpointWritten(step=4, generation=1, path="there"))
    job.lose(0)
    job.lose(1)
    job.hello(1, checkpoints=((4, 1),))
    job.hello(0, checkpoints=((4, 1),))
    job.store_up()
    assert job.spawned_now() == [0, 1]
    job.spawned()
    job.arrive(job.ranks)
    assert set(sources(job).values()) == {StateSource.CHECKPOINT}
    assert job.last(journal.Formed).step == 4


def test_no_node_comes_in_time() -> None:
    """A node that does not arrive in time ends the job, and the reason names the node."""
    job = trained(5, nodes=2, processes=1)
    job.lose(1)
    job.fire("node")
    assert job.phase is Phase.STOPPING
    job.killed()
    assert job.outcome is False
    assert "node 1" in job.last(journal.Ended).reason


def test_no_node_comes_at_the_start() -> None:
    """If a node does not join at the start, the job ends and the reason names it."""
    job = Driver(nodes=2)
    job.hello(0)
    job.fire("node")
    assert job.outcome is False
    assert "no agent joined for node 1" in job.last(journal.Ended).reason


# ---- another coordinator


def test_another_coordinator_has_all_ranks_meet_again_with_what_they_have() -> None:
    """A new coordinator starts no rank again and loses no step.

    The numbers of generations and incidents continue to rise.
    """
    job = trained(5, nodes=2, processes=2)
    take_over(job)
    assert job.phase is Phase.REGROUPING
    assert not job.unstarted
    assert "leave" in job.timers
    job.arrive([0, 1], finished=7)
    job.arrive([2, 3], finished=8)
    job.store_up()
    assert set(sources(job).values()) == {StateSource.SELF, StateSource.PEER}
    form = job.sent_by_node(p.FormGeneration)[0]
    assert (form.generation, form.step) == (2, 8)
    job.ready(job.ranks)
    job.step(9)
    [incident] = journal.incidents(job.history)
    assert (incident.cause.kind, incident.strategy) == (FaultKind.COORDINATOR, Strategy.RETRY)
    assert (incident.closed, incident.steps_lost) == (True, 0)


def test_another_coordinator_starts_what_has_died_meanwhile() -> None:
    """A rank that no agent reports is dead.

    The new coordinator starts it with a live peer's state.
    """
    job = trained(5, processes=3)
    take_over(job, dead=(1,))
    job.store_up()
    assert job.spawned_now() == [1]
    job.spawned()
    job.arrive([1])
    job.arrive([0, 2], finished=5)
    assert sources(job) == {0: StateSource.SELF, 1: StateSource.PEER, 2: StateSource.SELF}


def test_another_coordinator_goes_on_with_the_incident_that_was_open() -> None:
    """The new coordinator reads the open incident from the journal and closes the same incident."""
    job = trained(5)
    job.exits(0, signal=SIGKILL, finished=5)
    take_over(job, dead=(0,))
    job.store_up()
    job.spawned()
    job.arrive([0])
    job.arrive([1], finished=5)
    job.ready(job.ranks)
    job.step(6)
    [incident] = journal.incidents(job.history)
    assert incident.closed
    assert incident.cause.kind is FaultKind.PROCESS


def test_another_coordinator_knows_the_restarts_that_are_used() -> None:
    """A new coordinator does not renew the restart budget."""
    job = trained(5, policy=Policy(max_restarts=1))
    job.raises(0)
    job.killed()
    job.store_up()
    job.spawned()
    job.form()
    job.step(6)
    take_over(job)
    assert job.machine.job.restarts == 1
    job.raises(1, "KeyError: 'another'")
    assert job.phase is Phase.STOPPING
    assert "1 of 1 restarts are used" in job.last(journal.Decided).reason


def test_ranks_of_before_a_restart_do_not_come_back() -> None:
    """During a restart, an agent that reconnects with its old ranks is refused."""
    job = trained(5, nodes=2, processes=1, policy=Policy(max_restarts=1))
    old = (p.LiveRank(rank=1, pid=job.pids[1], training=True),)
    job.raises(0)
    job.lose(1)
    job.hello(1, generation=1, ranks=old)
    assert "the job restarts all ranks" in job.refusals()[-1]
    job.killed()
    assert job.phase is Phase.GATHERING
    job.hello(1, generation=1, ranks=old)
    assert "the job restarts all ranks" in job.refusals()[-1]
    job.hello(1)
    job.store_up()
    assert job.spawned_now() == [0, 1]


def test_a_node_whose_line_was_cut_comes_back_with_its_ranks() -> None:
    """An agent that reconnects with its ranks keeps their state. Only the lost node is a fault."""
    job = trained(5, nodes=2, processes=1)
    old = (p.LiveRank(rank=1, pid=job.pids[1], training=True),)
    job.lose(1)
    job.hello(1, generation=1, ranks=old)
    assert job.sent_by_node(p.GenerationEnded)[1].generation == 1
    job.arrive(job.ranks, finished=5)
    assert set(sources(job).values()) == {StateSource.SELF}
    job.ready(job.ranks)
    job.step(6)
    (incident,) = journal.incidents(job.history)
    assert [fault.kind for fault in incident.faults] == [FaultKind.NODE_LOST]


def test_another_coordinator_of_an_untouched_script_waits_for_its_end() -> None:
    """Ranks without a Session continue under a new coordinator, without an incident or a start.

    The ranks that ended well keep their result.
    """
    job = Driver(processes=3)
    job.start()
    job.exits(2, code=0)
    job.lose_coordinator()
    live = tuple(p.LiveRank(rank=rank, pid=job.pids[rank]) for rank in (0, 1))
    job.hello(0, ranks=live, ended=(2,))
    assert not job.unstarted
    job.exits(0, code=0)
    job.exits(1, code=0)
    assert job.outcome is True
    assert not journal.incidents(job.history)


def test_an_agent_that_does_not_come_to_another_coordinator_is_replaced() -> None:
    """If an agent does not reach the new coordinator in time, the job requests its node."""
    job = trained(5, nodes=2, processes=1)
    job.lose_coordinator()
    job.hello(0, generation=1, ranks=(p.LiveRank(rank=0, pid=job.pids[0], training=True),))
    job.fire("late")
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [1]


def test_a_new_agent_that_ends_before_it_joins_is_replaced() -> None:
    """The job requests an agent again if none joins. Each pause is twice as long."""
    job = trained(5, nodes=2, processes=1)
    job.lose(1)
    pauses = [job.timers["wanted"]]
    for _ in range(3):
        job.fire("wanted")
        pauses.append(job.timers["wanted"])
    assert [wanted.node for wanted in job.recorded(journal.NodeWanted)] == [1] * 4
    assert pauses == [pauses[0] * 2**n for n in range(4)]
    job.hello(1)
    job.fire("wanted")
    assert "wanted" not in job.timers
    assert len(job.recorded(journal.NodeWanted)) == 4


def test_a_node_that_a_spare_becomes_is_not_requested_again() -> None:
    """The job requests no agent for a node while a spare becomes this node."""
    job = trained(5, nodes=2, processes=1, spares=1)
    job.hello(spare=True)
    job.lose(1)
    assert job.promotions
    job.fire("wanted")
    assert 1 not in [wanted.node for wanted in job.recorded(journal.NodeWanted)]


@pytest.mark.parametrize("why", ["failed", "stopped"])
def test_another_coordinator_does_not_revive_a_job_that_was_ending(why: str) -> None:
    """If the old coordinator was ending the job, the new one ends it and starts nothing."""
    job = trained(5, processes=3)
    if why == "failed":
        job.raises(0)
    else:
        job.stop()
    take_over(job, dead=(0,))
    assert job.phase in (Phase.STOPPING, Phase.ENDED)
    assert not job.stores
    assert job.refusals()[-1] == "the job is ending"
    job.fire("late")
    assert job.phase is Phase.ENDED
    assert job.last(journal.Ended).outcome == why
