"""The coordinator's machine and faults that are injected: to whom, when, and when not."""

from __future__ import annotations

import pytest
from jobs.driver import Driver

from rekindle.protocol import agent as p
from rekindle.protocol.agent import Inject, InjectionKind

KILL = InjectionKind.KILL


def allowed() -> Driver:
    """A job of two nodes that lets itself be broken; nothing has come yet."""
    return Driver(nodes=2, processes=1, allow_injection=True)


def inject(driver: Driver, rank: int, step: int | None = None) -> str:
    """Order a fault; return why not."""
    refused = driver.machine.injections.inject(Inject(rank=rank, kind=KILL, step=step))
    driver.collect()
    return refused


def test_at_once() -> None:
    """A rank that trains is told at once."""
    driver = allowed()
    driver.train()
    assert inject(driver, 1) == ""
    assert driver.told(p.Inject)[1].rank == 1


def test_before_there_are_ranks() -> None:
    """It waits until its rank trains, and is told once."""
    driver = allowed()
    assert inject(driver, 1, step=3) == ""
    driver.start()
    driver.arrive(driver.ranks)
    driver.ready([0])
    assert not driver.told(p.Inject)
    driver.ready([1])
    assert driver.told(p.Inject)[1].step == 3
    driver.exits(1, signal=9, finished=3)
    driver.spawned()
    driver.arrive([0], 3)
    driver.arrive([1])
    driver.ready(driver.ranks)
    assert not driver.told(p.Inject)


def test_for_the_next_process() -> None:
    """What a process did not live to see strikes the next one; what struck it does not."""
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
    assert driver.told(p.Inject)[1].step == 8


def test_lost_with_its_node() -> None:
    """How far its ranks had come is not known: nothing strikes twice."""
    driver = allowed()
    driver.train()
    inject(driver, 1, step=8)
    driver.lose(1)
    driver.hello(1)
    driver.spawned()
    driver.arrive([0], 3)
    driver.arrive([1])
    driver.ready(driver.ranks)
    assert not driver.told(p.Inject)


def test_a_step_that_is_past_when_the_rank_begins() -> None:
    """A job that is resumed behind it does not suffer it."""
    driver = allowed()
    inject(driver, 0, step=2)
    driver.hello(0, checkpoints=((5, 0),))
    driver.hello(1)
    driver.store_up()
    driver.spawned()
    driver.arrive(driver.ranks)
    driver.ready(driver.ranks)
    assert not driver.told(p.Inject)


@pytest.mark.parametrize(
    ("rank", "step", "words"),
    [(2, None, "not have a rank 2"), (-1, None, "not have a rank -1"), (0, 3, "step 3 is over")],
)
def test_what_cannot_be(rank: int, step: int | None, words: str) -> None:
    """Who asks is told why not."""
    driver = allowed()
    driver.train(finished=5)
    assert words in inject(driver, rank, step)


def test_without_a_step_the_rank_must_train() -> None:
    """ "The next step" of a rank that is not in one means nothing."""
    assert "is not in a step, but absent" in inject(allowed(), 0)


def test_a_job_that_does_not_allow_it() -> None:
    """It is named what would."""
    driver = Driver()
    driver.train()
    assert "--allow-injection" in inject(driver, 0)


def test_a_job_that_ends() -> None:
    """Nothing waits for a rank that will not come."""
    driver = allowed()
    driver.train()
    driver.stop()
    assert inject(driver, 0, step=9) == "the job is ending"
