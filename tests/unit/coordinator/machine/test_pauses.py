"""Pauses between two steps: when the machine requests one, and what it does when all ranks wait."""

from __future__ import annotations

from jobs.driver import Driver

from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p


class Asks:
    """A part that needs a pause. `works`: how often every rank waited."""

    def __init__(self, driver: Driver) -> None:
        self.pause_cause: p.Cause | None = None
        self.paused = self.works = 0
        self.busy = False
        driver.machine.pauses._users = (self,)

    def on_paused(self, now: float) -> None:
        self.paused += 1

    def work_in_pause(self) -> bool:
        self.works += 1
        return self.busy


def test_a_request_waits_until_every_rank_has_stepped() -> None:
    """The machine requests a pause once every rank has finished a step of the generation."""
    driver = Driver()
    driver.start()
    asks = Asks(driver)
    asks.pause_cause = p.Cause(kind="test")
    driver.form()
    driver.step_of([0], 1)
    assert not driver.sent(p.PauseRequest)
    driver.step_of([1], 1)
    assert [each.message.rank for each in driver.sent(p.PauseRequest)] == [0]


def test_one_request_in_a_generation() -> None:
    """A second need in the same generation has no second request. The next generation has one."""
    driver = Driver()
    driver.train()
    asks = Asks(driver)
    asks.pause_cause = p.Cause(kind="test")
    driver.step_of([0], 2)
    assert len(driver.sent(p.PauseRequest)) == 1
    driver.step_of([1], 2)
    assert not driver.sent(p.PauseRequest)
    driver.say(0, p.Paused(rank=0, generation=1, finished=2))
    assert asks.paused == 1
    assert driver.phase is Phase.REGROUPING
    driver.form(2)
    driver.step_of([0], 3)
    assert not driver.sent(p.PauseRequest)
    driver.step_of([1], 3)
    assert driver.sent(p.PauseRequest)


def test_a_part_that_works_holds_the_next_generation() -> None:
    """The next generation waits for a part that works, also after a fault without a pause."""
    driver = Driver()
    driver.train()
    asks = Asks(driver)
    asks.busy = True
    driver.exits(1, signal=9)
    driver.spawned()
    driver.arrive([0], 1)
    driver.arrive([1])
    assert asks.works
    assert not driver.sent(p.FormGeneration)
    asks.busy = False
    driver.machine._proceed()
    driver.collect()
    assert driver.sent(p.FormGeneration)


def test_the_ranks_learn_the_cause() -> None:
    """The end of a generation names its cause, and the next generation also the strategy."""
    driver = Driver()
    driver.train()
    driver.exits(1, signal=9)
    (over,) = driver.sent(p.GenerationEnded)
    assert over.message.cause == p.Cause(kind="process", ranks=(1,))
    driver.spawned()
    driver.arrive([0], 1)
    driver.arrive([1])
    (form,) = driver.sent(p.FormGeneration)
    assert form.message.cause == p.Cause(kind="process", strategy="recover-in-place", ranks=(1,))


def test_the_ranks_learn_the_cause_of_a_pause() -> None:
    """A pause without a fault has the cause of the part that needs it."""
    driver = Driver()
    driver.train()
    asks = Asks(driver)
    asks.pause_cause = p.Cause(kind="join", ranks=(5,))
    driver.step_of([0], 2)
    driver.say(0, p.Paused(rank=0, generation=1, finished=2))
    assert driver.sent(p.GenerationEnded)[0].message.cause == asks.pause_cause
    driver.arrive(driver.ranks, 2)
    assert driver.sent(p.FormGeneration)[0].message.cause == asks.pause_cause
