"""Injected faults: the rank that gets them, the time, and the cases that are refused."""

from __future__ import annotations

import pytest
from jobs.driver import Driver

from rekindle.protocol import agent as p
from rekindle.protocol.agent import Inject, InjectionKind

KILL = InjectionKind.KILL


def allowed() -> Driver:
    """Return a job of two nodes that allows injection. No agent has joined yet."""
    return Driver(nodes=2, processes=1, allow_injection=True)


def inject(driver: Driver, rank: int, step: int | None = None) -> str:
    """Order a fault. Return the reason if the job refuses it."""
    refused = driver.machine.injections.inject(Inject(rank=rank, kind=KILL, step=step))
    driver.collect()
    return refused


def test_at_once() -> None:
    """A rank that trains gets the order immediately."""
    driver = allowed()
    driver.train()
    assert inject(driver, 1) == ""
    assert driver.sent_by_node(p.Inject)[1].rank == 1


def test_before_there_are_ranks() -> None:
    """An order for a later rank waits until the rank trains, and is sent once."""
    driver = allowed()
    assert inject(driver, 1, step=3) == ""
    driver.start()
    driver.arrive(driver.ranks)
    driver.ready([0])
    assert not driver.sent_by_node(p.Inject)
    driver.ready([1])
    assert driver.sent_by_node(p.Inject)[1].step == 3
    driver.exits(1, signal=9, finished=3)
    driver.spawned()
    driver.arrive([0], 3)
    driver.arrive([1])
    driver.ready(driver.ranks)
    assert not driver.sent_by_node(p.Inject)


def test_for_the_next_process() -> None:
    """A new process gets only the order that the old process did not reach."""
    driver = allowed()
    driver.train()
    for step in (3, 8):
        inject(driver, 1, step=step)
    driver.exits(1, signal=9, finished=3)
    driver.spawned()
    driver.arrive([0], 3)
    driver.arrive([1])
    driver.ready([0])
    driver.ready([1])
    assert driver.sent_by_node(p.Inject)[1].step == 8


def test_lost_with_its_node() -> None:
    """If a node is lost, its order is dropped, because the progress of its ranks is unknown."""
    driver = allowed()
    driver.train()
    inject(driver, 1, step=8)
    driver.lose(1)
    driver.hello(1)
    driver.spawned()
    driver.arrive([0], 3)
    driver.arrive([1])
    driver.ready(driver.ranks)
    assert not driver.sent_by_node(p.Inject)


def test_a_step_that_is_past_when_the_rank_begins() -> None:
    """If the job resumes after the step of an order, the order is dropped."""
    driver = allowed()
    inject(driver, 0, step=2)
    driver.hello(0, checkpoints=((5, 0),))
    driver.hello(1)
    driver.store_up()
    driver.spawned()
    driver.arrive(driver.ranks)
    driver.ready(driver.ranks)
    assert not driver.sent_by_node(p.Inject)


@pytest.mark.parametrize(
    ("rank", "step", "words"),
    [(2, None, "not have a rank 2"), (-1, None, "not have a rank -1"), (0, 3, "step 3 is over")],
)
def test_what_cannot_be(rank: int, step: int | None, words: str) -> None:
    """An impossible order returns the reason."""
    driver = allowed()
    driver.train(finished=5)
    assert words in inject(driver, rank, step)


def test_without_a_step_the_rank_must_train() -> None:
    """An order for "the next step" is refused if the rank is not in a step."""
    assert "is not in a step, but absent" in inject(allowed(), 0)


def test_a_job_that_does_not_allow_it() -> None:
    """A job without injection refuses the order and names the option that allows it."""
    driver = Driver()
    driver.train()
    assert "--allow-injection" in inject(driver, 0)


def test_a_job_that_ends() -> None:
    """A job that ends refuses an order for a later step."""
    driver = allowed()
    driver.train()
    driver.stop()
    assert inject(driver, 0, step=9) == "the job is ending"
