"""Steps that a guard skips, in a Session without an agent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rekindle.errors import SessionError
from rekindle.training.torch import Guard, Session
from rekindle.training.torch.guard import SkippedStepError

BAD = 5  # the step with a bad batch


def train(guard: Guard | None, inputs: list[float], **given: Any) -> dict[str, Any]:
    """Train a small model with BatchNorm; return what is left of the training."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    finished: list[int] = []
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(4, 2, generator=generator) for _ in inputs]
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with Session(**objects, guard=guard, **given) as session:
        for step in session.steps(len(inputs)):
            with step:
                optimizer.zero_grad()
                loss = session.model(rows[step.number]).square().mean() * inputs[step.number]
                step.log(loss=loss)
                loss.backward()
                optimizer.step()
                scheduler.step()
                finished.append(step.number)
        assert session.finished == len(inputs)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    return {"finished": finished, "state": state, "lr": scheduler.get_last_lr()}


def test_a_step_with_a_broken_gradient_has_no_effect() -> None:
    """Parameters, statistics of BatchNorm and the scheduler are those without this batch."""
    inputs = [1.0] * 10
    skipped = train(Guard(), [*inputs[:BAD], math.nan, *inputs[BAD + 1 :]])
    assert skipped["finished"] == [each for each in range(10) if each != BAD]
    assert all(each.isfinite().all() for each in skipped["state"].values())
    assert skipped["state"]["0.num_batches_tracked"] == 9
    assert skipped["lr"] == pytest.approx([0.01 * 0.9**9])
    assert not train(None, [math.nan, 1.0])["state"]["1.weight"].isfinite().all()


def test_a_spike_is_skipped() -> None:
    """A loss far above the median is skipped, and usual losses are not."""
    inputs = [*[1.0] * 30, 1000.0, *[1.0] * 5]
    assert 30 not in train(Guard(spike=10.0), inputs)["finished"]
    assert len(train(Guard(spike=1e6), inputs)["finished"]) == 36
    assert len(train(Guard(), inputs)["finished"]) == 36


def test_too_many_skipped_steps_end_the_job() -> None:
    """The limit counts the skipped steps of a window."""
    bad = [math.nan if number % 3 == 2 else 1.0 for number in range(12)]
    text = "step 8 is the skipped step number 3 within 100 steps, and the limit is 2: a gradient"
    with pytest.raises(SessionError, match=text):
        train(Guard(limit=2), bad)
    assert len(train(Guard(limit=2, window=4), bad)["finished"]) == 8


def test_a_script_that_catches_the_error_skips_as_well() -> None:
    """The step has no update, and counts as skipped."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = model.weight.clone()
    guard = Guard()
    with Session(model=model, optimizer=optimizer, guard=guard) as session:
        for step in session.steps(1):
            with step:
                (model(torch.ones(1)) * math.inf).sum().backward()
                with pytest.raises(SkippedStepError):
                    optimizer.step()
    assert torch.equal(model.weight, before)
    assert guard.state_dict()["skipped"] == [0]


def test_wrong_use() -> None:
    """Each use that a guard cannot serve has an error with the remedy."""
    with pytest.raises(SessionError, match="spike is 0; give a number above 0"):
        Guard(spike=0)
    with pytest.raises(SessionError, match=r"call step.log\(score=\.\.\.\) in each step"):
        train(Guard(spike=3.0, metric="score"), [1.0])
    model = torch.nn.Linear(1, 1)
    lbfgs = torch.optim.LBFGS(model.parameters())
    with Session(model=model, optimizer=lbfgs, guard=Guard()) as session:
        for step in session.steps(1):
            with pytest.raises(SessionError, match="a closure computes them later"), step:
                lbfgs.step(lambda: model(torch.ones(1)).sum())
            break
    again = Session(model=model, optimizer=lbfgs, guard=Guard())
    with pytest.raises(SessionError, match="leave guard out of Session"), again as session:
        next(iter(session.epochs(1)))


def test_the_state_has_what_the_next_decisions_need() -> None:
    """A guard with the state of another one decides as that one."""
    first = Guard(spike=5.0, limit=1)
    train(first, [*[1.0] * 25, 1e6])
    second = Guard(spike=5.0, limit=1)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    with pytest.raises(SessionError, match="number 2 within"):
        train(second, [math.nan])
