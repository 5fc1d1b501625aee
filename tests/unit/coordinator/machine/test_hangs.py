"""Ranks that make no progress: the inspections, and the decision that follows."""

from __future__ import annotations

import math
from typing import Any

import pytest
from jobs.driver import Driver

from rekindle.coordinator.machine.hangs import ANSWER_S, LONGEST_ANSWER_S
from rekindle.coordinator.machine.job_state import Phase
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import RankActivity
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy


def training(**settings: Any) -> Driver:
    """Return a job of two nodes with two ranks each, all in a step."""
    driver = Driver(nodes=2, processes=2, **settings)
    driver.train(finished=5)
    return driver


def stall(
    driver: Driver, rank: int = 0, generation: int | None = None
) -> dict[int, p.InspectRanks]:
    """Let an agent report that a rank is late. Return the orders to inspect ranks, per node."""
    of = driver.machine.job.generation if generation is None else generation
    driver.say(driver.node_of(rank), p.RankStalled(rank=rank, generation=of))
    return driver.sent_by_node(p.InspectRanks)


def inspection(rank: int, *, late: bool = True, **fields: Any) -> p.RankInspection:
    """Return the inspection of a rank that waits for others for too long."""
    fields = {"finished": 5, "doing": RankActivity.STEP, "elapsed_s": 12.0} | fields
    fields = {"waiting": True, "limit_s": 0.0 if late else math.inf, **fields}
    return p.RankInspection(rank=rank, **fields)


def answer(
    driver: Driver, asked: dict[int, p.InspectRanks], *inspections: p.RankInspection
) -> None:
    """Let all nodes that got the order report their inspections."""
    for node, order in asked.items():
        own = tuple(each for each in inspections if driver.node_of(each.rank) == node)
        driver.say(node, p.RanksInspected(serial=order.serial, looks=own))


def culprit(rank: int, of: int = 4) -> list[p.RankInspection]:
    """Return inspections in which one rank reads data and all others wait."""
    stuck = inspection(rank, waiting=False, where="read (data.py:3)", stack="File data.py")
    return [stuck if each == rank else inspection(each) for each in range(of)]


def test_the_culprit_is_replaced() -> None:
    """All agents inspect their ranks.

    The rank that did not join the others restarts on its node.
    """
    driver = training()
    asked = stall(driver)
    assert set(asked) == {0, 1}
    answer(driver, asked, *culprit(2))
    fault = driver.last(journal.FaultSeen).fault
    assert (fault.kind, fault.rank, fault.node) == (FaultKind.HANG, 2, 1)
    assert "rank 2 makes no progress" in fault.message
    assert "File data.py" in fault.traceback
    assert "rank 3: in a step for 12 s, waits for others" in fault.traceback
    assert driver.last(journal.Decided).strategy is Strategy.RECOVER_IN_PLACE
    assert driver.doomed == [2]
    assert "look" not in driver.timers


def test_nobody_to_blame() -> None:
    """If no rank is the cause, all ranks restart.

    After three such hangs, a fourth fails the job.
    """
    driver = training()
    for _ in range(3):
        answer(driver, stall(driver), *(inspection(rank) for rank in driver.ranks))
        fault = driver.last(journal.FaultSeen).fault
        assert (fault.kind, fault.rank, fault.node) == (FaultKind.HANG, -1, -1)
        assert driver.last(journal.Decided).strategy is Strategy.HANG_RESTART
        driver.killed()
        driver.store_up()
        driver.spawned()
        driver.form(finished=5)
        driver.step(5)
    answer(driver, stall(driver), *(inspection(rank) for rank in driver.ranks))
    assert driver.last(journal.Decided).strategy is Strategy.FAIL
    assert "it hung 3 consecutive times" in driver.last(journal.Decided).reason


def test_ranks_that_do_not_hang() -> None:
    """If no rank hangs, the job does nothing, and a later report starts another inspection."""
    driver = training()
    answer(driver, stall(driver), *(inspection(rank, late=False) for rank in driver.ranks))
    assert not driver.recorded(journal.FaultSeen)
    assert stall(driver)


def test_one_look_at_a_time() -> None:
    """Only one inspection runs at a time. Answers to an earlier inspection are ignored."""
    driver = training()
    asked = stall(driver)
    assert not stall(driver, rank=2)
    answer(driver, {0: asked[0]}, *culprit(2))
    driver.fire("look")
    driver.fire("look")
    again = stall(driver)
    driver.say(1, p.RanksInspected(serial=asked[1].serial, looks=(culprit(3)[3],)))
    assert not driver.recorded(journal.FaultSeen)
    answer(driver, again, *culprit(2))
    assert driver.last(journal.FaultSeen).fault.rank == 2


def test_an_agent_that_does_not_answer_is_judged_without() -> None:
    """If an agent does not answer in time, the verdict uses the other answers."""
    driver = training()
    asked = stall(driver)
    answer(driver, {1: asked[1]}, *culprit(2))
    driver.fire("look")
    assert driver.last(journal.FaultSeen).fault.rank == 2


def test_a_regroup_meanwhile_answers_it() -> None:
    """A regroup ends the inspection, because the answers belong to the old generation."""
    driver = training()
    asked = stall(driver)
    driver.fail_step(1)
    answer(driver, asked, *culprit(2))
    kinds = [event.fault.kind for event in driver.recorded(journal.FaultSeen)]
    assert kinds == [FaultKind.LINK]


def test_an_older_generation_cannot_stall() -> None:
    """A report about an older generation starts no inspection."""
    driver = training()
    assert not stall(driver, generation=0)


def test_ranks_that_meet_have_other_limits() -> None:
    """While a generation forms, a report of a late rank starts no inspection."""
    driver = training()
    driver.fail_step(1)
    assert driver.phase is Phase.REGROUPING
    assert not stall(driver)


@pytest.mark.parametrize("resting", [4, 3])
def test_a_script_without_a_session(resting: int) -> None:
    """A script without a Session hangs when all its ranks rest. All ranks then restart."""
    driver = Driver(nodes=2, processes=2)
    driver.start()
    fields = {"doing": RankActivity.OUTSIDE, "elapsed_s": 300.0}
    inspections = [inspection(rank, late=rank < resting, **fields) for rank in driver.ranks]
    answer(driver, stall(driver), *inspections)
    if resting < 4:
        assert not driver.recorded(journal.FaultSeen)
        return
    assert driver.last(journal.Decided).strategy is Strategy.HANG_RESTART
    assert sorted(driver.doomed) == [0, 1, 2, 3]


def test_an_agent_that_is_slow_has_more_time_where_all_others_wait() -> None:
    """If all inspected ranks wait, a slow agent gets more time: the cause is among its ranks.

    If it does not answer, the verdict names no rank.
    """
    driver = training()
    asked = stall(driver)
    answer(driver, {0: asked[0]}, *culprit(2))
    driver.fire("look")
    assert driver.timers["look"] == LONGEST_ANSWER_S - ANSWER_S
    answer(driver, {1: asked[1]}, *culprit(2))
    assert driver.last(journal.FaultSeen).fault.rank == 2
    driver = training()
    answer(driver, {0: stall(driver)[0]}, *culprit(2))
    driver.fire("look")
    driver.fire("look")
    assert not driver.recorded(journal.FaultSeen)
    assert "look" not in driver.timers


def test_nobody_is_blamed_by_some_of_the_answers() -> None:
    """A missing answer may show a rank that differs, so the partial answers cause no fault."""
    driver = training()
    asked = stall(driver)
    inspections = [
        inspection(0, waiting=False, where="read"),
        inspection(1, waiting=False, busy=True),
    ]
    answer(driver, {0: asked[0]}, *inspections)
    driver.fire("look")
    driver.fire("look")
    assert not driver.recorded(journal.FaultSeen)
    assert "again" not in driver.timers


def test_an_agent_that_could_not_look_has_not_answered() -> None:
    """An agent that could not inspect its ranks counts as unanswered.

    The job does not wait for it.
    """
    driver = training()
    asked = stall(driver)
    driver.say(1, p.RanksInspected(serial=asked[1].serial, looks=(), error="no file descriptors"))
    answer(driver, {0: asked[0]}, *culprit(2))
    assert "look" not in driver.timers
    assert not driver.recorded(journal.FaultSeen)


@pytest.mark.parametrize("still", [True, False])
def test_between_steps_two_looks_have_to_agree(still: bool) -> None:
    """Between steps, two inspections must agree, because a rank may rest for only a moment."""
    driver = training()
    rests = inspection(2, waiting=False, doing=RankActivity.BETWEEN)
    others = [inspection(rank) for rank in (0, 1, 3)]
    answer(driver, stall(driver), rests, *others)
    assert not driver.recorded(journal.FaultSeen)
    assert not stall(driver, rank=3)  # a second inspection follows soon
    driver.fire("again")
    asked = driver.sent_by_node(p.InspectRanks)
    computes = inspection(2, waiting=False, doing=RankActivity.BETWEEN, busy=True, late=False)
    answer(driver, asked, rests if still else computes, *others)
    assert bool(driver.recorded(journal.FaultSeen)) is still
    assert "again" not in driver.timers


def test_looks_that_find_nothing_come_less_and_less_often() -> None:
    """Inspections without a result become rarer, however many agents report late ranks.

    A newly late rank or a finished step causes an immediate inspection.
    """
    driver = training()
    evaluates = [
        inspection(0, waiting=False, doing=RankActivity.EVALUATE, late=False),
        inspection(1),
        inspection(2),
    ]
    looked = []
    for turn in range(2000):
        driver.now += 0.1
        if asked := stall(driver, rank=1 + turn % 2):
            looked.append(driver.now)
            answer(driver, asked, *evaluates)
    assert len(looked) <= 12
    assert looked[-1] - looked[-2] >= 29.0
    assert stall(driver, rank=3), "it was not late before"
    answer(driver, driver.sent_by_node(p.InspectRanks), *evaluates, inspection(3))
    assert not stall(driver, rank=3)
    driver.say(0, p.Heartbeat(finished={0: 6, 1: 6}, total=9, metrics={}))
    assert stall(driver), "a step was finished since"


def test_a_look_does_not_outlive_the_ranks_that_it_was_about() -> None:
    """A restart of a script without a Session ends the inspection.

    The generation stays the same.
    """
    driver = Driver(nodes=2, processes=2, policy=Policy(max_restarts=1))
    driver.start()
    asked = stall(driver)
    driver.exits(0, code=1)
    assert driver.phase is Phase.RESTARTING
    assert "look" not in driver.timers
    driver.killed()
    driver.store_up()
    driver.spawned()
    assert driver.phase is Phase.REGROUPING
    fields = {"doing": RankActivity.OUTSIDE, "elapsed_s": 1800.0}
    answer(driver, asked, *(inspection(rank, **fields) for rank in driver.ranks))
    assert driver.phase is Phase.REGROUPING
    assert stall(driver)


def test_all_wait_for_a_rank_that_ended_well() -> None:
    """If all ranks wait for a rank that ended with status 0, that rank is the cause.

    Links that do not break give no other evidence that it left too early.
    """
    driver = training()
    driver.exits(2, code=0)
    answer(driver, stall(driver), *(inspection(rank) for rank in (0, 1, 3)))
    fault = driver.last(journal.FaultSeen).fault
    assert (fault.kind, fault.rank) == (FaultKind.USER_CODE, 2)
    assert "ended with exit status 0" in fault.message


def test_all_stopped_ranks_are_replaced_at_once() -> None:
    """All stopped ranks restart in one incident, with one fault for each."""
    driver = training()
    stopped = {rank: inspection(rank, waiting=False, stopped=True) for rank in (0, 3)}
    answer(driver, stall(driver), *(stopped.get(rank) or inspection(rank) for rank in driver.ranks))
    assert driver.doomed == [0, 3]
    faults = [event.fault for event in driver.recorded(journal.FaultSeen)]
    assert [(fault.kind, fault.rank) for fault in faults] == [
        (FaultKind.HANG, 0),
        (FaultKind.HANG, 3),
    ]
    assert len({event.incident for event in driver.recorded(journal.FaultSeen)}) == 1


def slow(rank: int, elapsed_s: float, **fields: Any) -> list[p.RankInspection]:
    """Return inspections in which one rank rests in a step and all others wait for it."""
    fields = {"doing": RankActivity.FIRST, "waiting": False, "limit_s": 10.0} | fields
    return [
        inspection(each, elapsed_s=elapsed_s, **(fields if each == rank else {}))
        for each in range(4)
    ]


def replaced(driver: Driver, rank: int, finished: int = 5) -> None:
    """Replace the killed rank, and let all ranks continue from its step."""
    driver.killed()
    driver.spawned()
    driver.form(finished=finished)


def hangs_of(driver: Driver) -> int:
    return len(driver.recorded(journal.FaultSeen))


def test_a_replacement_at_the_same_place_has_twice_the_time() -> None:
    """Each hang of a rank at the same place doubles its time there.

    The machine inspects again exactly when that time is over.
    """
    driver = training(policy=Policy(max_in_row=10))
    answer(driver, stall(driver), *slow(2, 11.0, doing=RankActivity.STEP))
    for number, limit_s in ((1, 20.0), (2, 40.0), (3, 80.0)):
        replaced(driver, 2)
        answer(driver, stall(driver, rank=2), *slow(2, 11.0))
        assert hangs_of(driver) == number
        assert driver.timers["again"] == limit_s - 11.0
        driver.fire("again")
        answer(driver, driver.sent_by_node(p.InspectRanks), *slow(2, limit_s))
        assert hangs_of(driver) == number + 1
        assert (
            f"earlier hangs at the same place: {number}"
            in driver.last(journal.FaultSeen).fault.message
        )


@pytest.mark.parametrize(
    ("rank", "fields"),
    [
        (3, {}),
        (2, {"doing": RankActivity.EVALUATE}),
        (2, {"stopped": True}),
    ],
)
def test_another_hang_has_no_more_time(rank: int, fields: dict[str, Any]) -> None:
    """A hang of another rank, in another activity, or of a stopped process is found at once."""
    driver = training()
    answer(driver, stall(driver), *slow(2, 11.0))
    replaced(driver, 2)
    answer(driver, stall(driver, rank=rank), *slow(rank, 11.0, **fields))
    if RankActivity.EVALUATE in fields.values():
        driver.fire("again")
        answer(driver, driver.sent_by_node(p.InspectRanks), *slow(rank, 12.5, **fields))
    assert hangs_of(driver) == 2


def test_a_finished_step_ends_the_patience() -> None:
    """After a finished step of the job, a hang at the same place is found as soon as the first."""
    driver = training()
    answer(driver, stall(driver), *slow(2, 11.0))
    replaced(driver, 2)
    driver.step(6)
    answer(driver, stall(driver, rank=2), *slow(2, 11.0, finished=6))
    assert hangs_of(driver) == 2


def test_all_ranks_that_hung_have_more_time_after_a_restart() -> None:
    """A hang without a faulty rank doubles the time of each rank at that place."""
    driver = training()
    alike = [slow(rank, 11.0)[rank] for rank in range(3)]
    answer(driver, stall(driver), *alike, inspection(3))
    assert driver.last(journal.FaultSeen).fault.rank == -1
    driver.killed()
    driver.store_up()
    driver.spawned()
    driver.form(finished=5)
    answer(driver, stall(driver), *alike, inspection(3))
    assert hangs_of(driver) == 1
    assert driver.timers["again"] == 9.0


def test_a_new_coordinator_keeps_the_patience() -> None:
    """A coordinator that takes over computes the time of a rank from the journal."""
    driver = training()
    answer(driver, stall(driver), *slow(2, 11.0))
    replaced(driver, 2)
    driver.lose_coordinator()
    for node in (0, 1):
        live = (
            p.LiveRank(rank=r, pid=driver.pids[r], training=True) for r in (2 * node, 2 * node + 1)
        )
        driver.hello(node, generation=2, ranks=tuple(live))
    driver.store_up()
    driver.form(finished=5)
    answer(driver, stall(driver, rank=2), *slow(2, 11.0))
    assert driver.timers["again"] == 9.0
