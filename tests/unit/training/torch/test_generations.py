"""Gradients whose memory belongs to the script, or to a CUDA graph, stay in that memory."""

from __future__ import annotations

import pytest
import torch

from rekindle.errors import SessionError
from rekindle.training.torch import Session
from rekindle.training.torch.torch_generations import renew_gradients


def flat_gradients(model: torch.nn.Module) -> torch.Tensor:
    """Put all gradients into one tensor, like a script that all-reduces them in one call."""
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    begin = 0
    for parameter in model.parameters():
        parameter.grad = flat[begin : begin + parameter.numel()].view(parameter.shape)
        begin += parameter.numel()
    return flat


def test_a_session_leaves_gradients_in_the_memory_of_the_script() -> None:
    """A Session does not move gradients out of the script's memory.

    Otherwise the script would all-reduce a tensor without gradients, and no error would show it.
    """
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = flat_gradients(model)
    with Session(model=model, optimizer=optimizer) as session:
        for step in session.steps(2):
            with step:
                flat.zero_()
                session.model(torch.ones(1, 3)).sum().backward()
                assert flat.tolist() == [1.0] * 8
                optimizer.step()


def test_gradients_of_a_broken_step_become_zero_in_place_or_none() -> None:
    """After a broken step, a rank sets gradients to zero in place only with `keep`, else to None.

    `keep` is for a script that keeps their memory from step to step.
    """
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    gradient = parameters[0].grad = torch.ones(2)
    renew_gradients(parameters, keep=True)
    assert parameters[0].grad is gradient
    assert gradient.tolist() == [0.0, 0.0]
    assert parameters[1].grad is None
    renew_gradients(parameters, keep=False)
    assert parameters[0].grad is None


def test_statistics_of_each_rank_in_a_loop_over_epochs() -> None:
    """This loop takes its snapshots outside of steps, so it refuses a state of single ranks."""
    model = torch.nn.BatchNorm1d(2)
    given = Session(model=model, optimizer=torch.optim.SGD(model.parameters()))._loop.given
    given.check_epochs(alone=False)
    with pytest.raises(SessionError, match="does not keep the running statistics of BatchNorm"):
        given.check_epochs(alone=True)
