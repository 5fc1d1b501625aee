"""Jobs whose world can shrink, in the states in which tests begin."""

from __future__ import annotations

from jobs.driver import Driver
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy


def trained(*, nodes: int = 3, least: int = 1, policy: Policy | None = None) -> Driver:
    """Return a training job with two ranks per node that can continue with `least` nodes."""
    driver = Driver(nodes=nodes, processes=2, least=least, policy=policy)
    driver.train(finished=5)
    return driver


def shrunk(**settings: int) -> Driver:
    """Return such a job after the loss of node 1."""
    driver = trained(**settings)
    driver.lose(1)
    driver.arrive([0, 1, 4, 5], finished=5)
    return driver


def come_back(driver: Driver, node: int = 1) -> None:
    """Connect the agent of the node and let its ranks arrive."""
    driver.hello(node)
    assert driver.spawned_now() == [2 * node, 2 * node + 1]
    driver.spawned()
    driver.arrive([2 * node, 2 * node + 1])


def hold(driver: Driver) -> None:
    """Pause the first rank of the world between two steps, as the coordinator requests."""
    ((node, order),) = driver.sent_by_node(p.PauseRequest).items()
    assert order.rank == driver.machine.job.roster.world[0].rank
    driver.say(node, p.Paused(rank=order.rank, generation=order.generation, finished=0))


def grown() -> Driver:
    """Return a job whose world has just grown by a node that returned."""
    driver = shrunk()
    driver.ready([0, 1, 4, 5])
    driver.step_of([0, 1, 4, 5], 6)
    come_back(driver)
    hold(driver)
    driver.arrive([0, 1, 4, 5], finished=9)
    assert driver.last(journal.Formed).world_size == 6
    return driver
