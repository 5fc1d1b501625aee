"""Agents in reserve: when a spare replaces a lost node."""

from __future__ import annotations

from jobs.driver import Driver

from rekindle.coordinator.machine.job_state import Phase
from rekindle.names import SPARE
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy


def trained(*, spares: int = 1) -> tuple[Driver, list[int]]:
    """Return a job of two nodes that trains, and the connections of its spares."""
    driver = Driver(nodes=2, processes=1)
    waiting = [driver.hello(spare=True, checkpoints=((3, 1),)) for _ in range(spares)]
    driver.train()
    return driver, waiting


def promoted(driver: Driver) -> dict[int, int]:
    """Return the nodes that the last commands assigned to spares: connection -> node."""
    return {c.connection: c.message.node for c in driver.sent(p.Promote)}


def test_spare_waits() -> None:
    """A spare that joins first does not become a node that is still to join."""
    driver = Driver(nodes=1, processes=2)
    spare = driver.hello(spare=True)
    (welcome,) = driver.sent(p.Welcome)
    assert (welcome.connection, welcome.message.node) == (spare, SPARE)
    driver.hello(0)
    assert driver.last(journal.NodeJoined).node == 0
    assert list(driver.machine.job.roster.nodes) == [0]


def test_spare_takes_a_lost_nodes_place() -> None:
    """A spare is promoted immediately, sends hello as the node, and its ranks start."""
    driver, (spare,) = trained()
    driver.lose(1)
    assert promoted(driver) == {spare: 1}
    decided = driver.last(journal.Decided)
    assert decided.strategy is Strategy.RECOVER
    assert decided.reason.endswith("a spare replaces it, and all healthy ranks wait")
    assert driver.last(journal.NodeWanted).node == SPARE
    driver.hello_again(spare, 1, spare=True)
    assert driver.spawned_now() == [1]
    driver.spawned()
    driver.form(1)
    driver.step(2)
    assert [i.closed for i in journal.incidents(driver.history)] == [True]
    assert driver.machine.job.roster.spares == {}


def test_no_spare_left() -> None:
    """If two nodes are lost with one spare, the job requests the second from the engine."""
    driver, (spare,) = trained()
    driver.lose(0)
    driver.lose(1)
    assert promoted(driver) == {}
    assert [event.node for event in driver.recorded(journal.NodeWanted)] == [SPARE, 1]
    driver.hello_again(spare, 0, spare=True)
    assert driver.spawned_now() == []
    driver.hello(1)
    driver.store_up()
    assert driver.unstarted
    assert driver.outcome is None


def test_a_spare_that_comes_late_is_promoted_at_once() -> None:
    """A spare that joins while a node is missing becomes that node, unless another agent will."""
    driver, _ = trained(spares=0)
    driver.lose(1)
    assert driver.last(journal.NodeWanted).node == 1
    first = driver.hello(spare=True)
    assert promoted(driver) == {first: 1}
    driver.hello(spare=True)
    assert promoted(driver) == {}


def test_agent_without_a_place_is_a_spare() -> None:
    """An agent without a node number becomes a spare if all nodes are present."""
    driver, _ = trained(spares=0)
    late = driver.hello()
    assert list(driver.machine.job.roster.spares) == [late]
    driver.lose(0)
    assert promoted(driver) == {late: 0}


def test_engine_was_faster() -> None:
    """A promoted spare becomes a spare again if another agent has become the node."""
    driver, (spare,) = trained()
    driver.lose(1)
    driver.hello(1)
    driver.hello_again(spare, 1, spare=True)
    (welcome,) = driver.sent(p.Welcome)
    assert (welcome.connection, welcome.message.node) == (spare, SPARE)
    driver.lose(0)
    assert promoted(driver) == {spare: 0}


def test_promoted_spare_is_lost() -> None:
    """If a promoted spare is lost, the next spare is promoted, then the engine is asked.

    The loss of a spare is not an incident.
    """
    driver, (first, second) = trained(spares=2)
    driver.lose(1)
    driver.lose_spare(first)
    assert promoted(driver) == {second: 1}
    driver.lose_spare(second)
    assert promoted(driver) == {}
    assert [e.node for e in driver.recorded(journal.NodeWanted)] == [SPARE, SPARE, 1]
    assert [e.left for e in driver.recorded(journal.SpareLost)] == [1, 0]
    assert [f.fault.kind for f in driver.recorded(journal.FaultSeen)] == [FaultKind.NODE_LOST]


def test_idle_spare_is_lost() -> None:
    """If an idle spare is lost, training continues, and the job requests another."""
    driver, (spare,) = trained()
    driver.lose_spare(spare)
    assert driver.phase is Phase.TRAINING
    assert driver.recorded(journal.FaultSeen) == []
    assert driver.last(journal.NodeWanted).node == SPARE


def test_spares_that_die_again_and_again_are_not_asked_for_for_ever() -> None:
    """The number of requests for lost spares is limited, because something kills them."""
    driver, _ = trained(spares=0)
    limit = driver.machine.job.spec.policy.max_recoveries
    for _ in range(limit + 3):
        driver.lose_spare(driver.hello(spare=True))
    assert len(driver.recorded(journal.NodeWanted)) == limit


def test_node_that_does_not_come_at_the_start() -> None:
    """If a node does not join at the start in time, a spare becomes that node."""
    driver = Driver(nodes=2, processes=1)
    spare = driver.hello(spare=True)
    driver.hello(0)
    driver.fire("late")
    assert promoted(driver) == {spare: 1}


def test_spare_tells_what_it_finds_when_it_is_promoted() -> None:
    """Checkpoints that a spare finds when it is promoted count, even if all others are lost."""
    driver, (spare,) = trained()
    driver.lose(0)
    driver.hello_again(spare, 0, spare=True, checkpoints=((5, 1), (3, 1)))
    assert driver.machine.job.roster.nodes[0].checkpoints == ((5, 1), (3, 1))


def test_place_taken_and_another_one_promised() -> None:
    """A spare that could not become its node gets its open promotion again."""
    driver, (spare,) = trained()
    driver.lose(1)
    driver.hello(1)
    driver.lose(0)
    assert promoted(driver) == {spare: 0}
    driver.hello_again(spare, 1, spare=True)
    assert promoted(driver) == {spare: 0}
    driver.hello_again(spare, 0, spare=True)
    assert sorted(driver.machine.job.roster.nodes) == [0, 1]


def test_promoted_spare_finds_its_place_taken_after_a_takeover() -> None:
    """A promoted spare that reconnects after a takeover becomes a spare if its node is taken."""
    driver, _ = trained()
    driver.lose_coordinator()
    driver.hello(1)
    late = driver.hello(1, spare=True)
    assert list(driver.machine.job.roster.spares) == [late]
    driver.hello(1)
    (refused,) = driver.refusals()
    assert "another agent is node 1" in refused


def test_spares_that_died_with_the_coordinator() -> None:
    """Spares that ended with the old coordinator are requested after the time for reconnection."""
    driver = Driver(nodes=1, processes=1, spares=2)
    for _ in range(2):
        driver.hello(spare=True)
    driver.train()
    driver.lose_coordinator()
    driver.hello(spare=True)
    driver.hello(0, generation=1, ranks=(p.LiveRank(rank=0, pid=driver.pids[0], training=True),))
    for _ in range(2):
        driver.fire("late")
    assert [event.node for event in driver.recorded(journal.NodeWanted)] == [SPARE]


def test_node_lost_before_any_rank_was_started() -> None:
    """A node that is lost before any rank starts is not an incident.

    Repeated losses fail the job.
    """
    driver = Driver(nodes=2, processes=1)
    spare = driver.hello(spare=True)
    driver.hello(0)
    driver.lose(0)
    assert promoted(driver) == {spare: 0}
    assert driver.recorded(journal.FaultSeen) == []
    for _ in range(driver.machine.job.spec.policy.max_in_row - 1):
        driver.hello(1)
        driver.lose(1)
    assert len(driver.recorded(journal.NodeLeft)) == driver.machine.job.spec.policy.max_in_row
    driver.hello(1)
    driver.lose(1)
    assert driver.last(journal.Decided).strategy is Strategy.FAIL


def test_goodbye() -> None:
    """At the end of the job, spares also get the message to end."""
    driver, (spare,) = trained()
    driver.stop()
    driver.killed()
    assert spare in [command.connection for command in driver.sent(p.EndAgent)]


def test_job_that_ends_needs_no_spare() -> None:
    """While the job ends, a lost node gets no spare and a lost spare no replacement."""
    driver, (spare,) = trained()
    driver.stop()
    driver.lose(1)
    assert promoted(driver) == {}
    driver.lose_spare(spare)
    assert driver.recorded(journal.NodeWanted) == []


def test_two_places_for_one_agent() -> None:
    """An agent that is a node cannot become another node. An agent with ranks cannot be a spare."""
    driver, _ = trained(spares=0)
    connection = driver.nodes[0]
    driver.lose(1)
    driver.hello_again(connection, 1)
    (refused,) = driver.refusals()
    assert refused == "the agent is node 0 already"
    driver.hello(ranks=(p.LiveRank(rank=1, pid=4),))
    (refused,) = driver.refusals()
    assert refused == "an agent with ranks must send its node rank"


def test_a_node_is_asked_for_once() -> None:
    """A node that is lost and late is requested only once."""
    driver, _ = trained(spares=0)
    driver.lose(1)
    driver.fire("late")
    assert [event.node for event in driver.recorded(journal.NodeWanted)] == [1]
