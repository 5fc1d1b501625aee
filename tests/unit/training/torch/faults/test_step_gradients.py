"""Gradients that a script adds up over several steps are refused, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rekindle.errors import SessionError
from rekindle.training.torch.faults.repairs import StepGradients

WHAT = "this step adds to the gradients of the step before"


class Script:
    """A model with an optimizer, and the steps of a script."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.gradients = StepGradients()
        self.gradients.watch(self.optimizer)
        self.updated = False

    def backward(self, factor: float = 1.0) -> None:
        """Do a forward and a backward pass."""
        (factor * self.model(torch.ones(1, 2))).sum().backward()

    def update(self) -> None:
        """Do an update, as the hook of the optimizer sees it."""
        self.gradients.check(self.optimizer)
        self.updated = True
        self.optimizer.step()

    def step(self, *work: Callable[[], object]) -> None:
        """Do a step of the script."""
        self.gradients.begin_step()
        self.updated = False
        for each in work:
            each()
        self.gradients.end_step(updated=self.updated)


@pytest.fixture
def script() -> Script:
    """Return a script at the begin of a generation."""
    script = Script()
    script.gradients.reset()
    return script


def test_accumulation_is_refused_at_the_update(script: Script) -> None:
    """The second step of two for one update is refused before the update."""
    for _ in range(2):
        script.step(script.optimizer.zero_grad, script.backward, script.update)
    script.step(script.optimizer.zero_grad, script.backward)
    before = script.model.weight.clone()
    with pytest.raises(SessionError, match=WHAT):
        script.step(script.backward, script.update)
    assert torch.equal(script.model.weight, before)


def test_accumulation_is_refused_without_an_update(script: Script) -> None:
    """The second step of three for one update is refused at its end."""
    script.step(script.backward)
    with pytest.raises(SessionError, match=WHAT):
        script.step(script.backward)


def test_gradients_that_nobody_resets_are_refused(script: Script) -> None:
    """A script that never resets its gradients is refused in its second step."""
    script.step(script.backward, script.update)
    with pytest.raises(SessionError, match=WHAT):
        script.step(script.backward, script.update)


def zero(script: Script) -> None:
    """Set the gradients to zero in place."""
    script.optimizer.zero_grad(set_to_none=False)


def quietly(script: Script) -> None:
    """Set the gradients to zero without their version counters."""
    for parameter in script.model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


@pytest.mark.parametrize("reset", [lambda s: s.optimizer.zero_grad(), zero, quietly])
@pytest.mark.parametrize("late", [False, True])
def test_other_scripts_are_not_refused(
    reset: Callable[[Script], None], late: bool, script: Script
) -> None:
    """Evaluation, skipped updates and backward passes for other purposes are allowed.

    The script resets its gradients at the start or at the end of a step, in any of three ways.
    """
    again = [lambda: reset(script)]
    first, last = ([], again) if late else (again, [])
    train = [*first, script.backward, script.update, *last]
    script.step(*train)
    script.step(*train)
    script.step()  # only evaluates
    script.step(*train)
    script.step(*first, lambda: script.backward(float("nan")), *last)  # leaves the update out
    script.step(*train)
    script.step(script.backward, *again, script.backward, script.update, *last)
    script.step(script.backward, *again)
    script.step(script.backward, *again, script.backward, script.update, *last)


def test_a_new_generation_forgets(script: Script) -> None:
    """A repeated step begins without gradients, so it is not compared with the broken one."""
    script.step(script.backward)
    script.gradients.begin_step()
    script.backward()
    script.gradients.reset()
    script.step(script.backward, script.update)


def test_two_optimizers_alternate(script: Script) -> None:
    """An update of another optimizer is an update; the gradients of this one are not compared."""
    other = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    script.gradients.watch(other)
    for _ in range(3):
        script.step(script.backward, lambda: script.gradients.check(other), other_update(script))
        script.step(script.optimizer.zero_grad, script.backward, script.update)


def other_update(script: Script) -> Callable[[], None]:
    """Return a function that records an update."""

    def update() -> None:
        script.updated = True

    return update
