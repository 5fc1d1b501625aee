"""If a generation ends during a step of a rank, the rank may finish the step first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from ranks import Rank, run
from ranks.agent import Agent
from waiting import bound_s, join, wait_asleep, wait_until

from rekindle import names
from rekindle.protocol.agent import Arrived, FormGeneration
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank import progress
from rekindle.rank.progress import CurrentStep
from rekindle.recovery.policy.plan import RankPlan, StateSource
from rekindle.training.torch import Session

WORLD = 2


@pytest.mark.parametrize("begun", [0, 1])
def test_others_that_have_not_finished_it_either_are_not_waited_for(begun: int) -> None:
    """The wait ends at once for a rank between two steps, or in a step newer than the others'."""
    step = CurrentStep()
    step.end(3)
    if begun:
        step.begin()
    step.wait_end(3)


@pytest.mark.parametrize("ends", [lambda step: step.end(4), lambda step: step.break_off()])
def test_the_wait_ends_with_the_step(
    ends: Callable[[CurrentStep], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for the current step ends when the step succeeds, and when it fails."""
    monkeypatch.setattr(progress, "STEP_LIMIT_S", 2 * bound_s())
    step = CurrentStep()
    step.begin()
    waiter = threading.Thread(target=step.wait_end, args=(4,))
    waiter.start()
    wait_asleep(waiter)
    assert waiter.is_alive()
    ends(step)
    join(waiter)


def test_a_step_that_does_not_end_is_left() -> None:
    """If the step does not end, the wait ends at its limit: the step's data may be lost."""
    step = CurrentStep()
    step.begin()
    step.wait_end(4)


@pytest.mark.parametrize("broke", [False, True])
def test_a_broken_step_is_told_of_once(broke: bool) -> None:
    step = CurrentStep()
    step.begin()
    if broke:
        step.break_off()
    else:
        step.end(1)
    assert [step.take_broken(), step.take_broken()] == [broke, False]


def _told_within_step(rank: Rank, ahead: int, sharded: bool) -> list[int | None]:
    """Return the finished steps at each arrival of the rank; its generation ends during step 1."""
    slot = rank.rank
    os.environ |= {
        "RANK": str(slot),
        "LOCAL_RANK": str(slot),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "WORLD_SIZE": str(WORLD),
        names.ENV_SLOT: str(slot),
        names.ENV_FULL_WORLD: str(WORLD),
        names.ENV_HEARTBEAT_FD: str(HeartbeatPage.create("rank")),
    }
    progress.STEP_LIMIT_S = bound_s()
    form = FormGeneration(
        generation=1,
        world_size=WORLD,
        store_host="127.0.0.1",
        store_port=rank.store.port,
        ranks={0: 0, 1: 1},
        step=0,
        plan={slot: RankPlan(source=StateSource.FRESH)},
    )
    agent = Agent([form])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(
        model=model,
        optimizer=optimizer,
        ddp=None if sharded else True,
        shard=slot if sharded else None,
    )
    with session:
        for step in session.steps(2):
            with step:
                if step.number == 1:
                    agent.over(1, finished=1 + ahead)
                    wait_until(lambda: session._loop.member.is_over, "the end of generation 1")
                    wait_until(
                        lambda: ahead or session._loop.generations.group.severed, "a severed group"
                    )
                optimizer.zero_grad()
                session.model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    return [message.finished for message in agent.received if isinstance(message, Arrived)]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.process
def test_a_step_that_others_have_finished_is_finished_first(ahead: int, sharded: bool) -> None:
    """A rank finishes a step that others have finished, because all its gradients are sent.

    It leaves a step that no rank has finished.
    """
    assert run(_told_within_step, WORLD, ahead, sharded) == [[None, 1 + ahead]] * WORLD
