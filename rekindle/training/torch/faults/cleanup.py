"""What a step that broke off leaves behind, and nobody wants."""

from __future__ import annotations

import traceback

import torch

from rekindle.training.torch.faults.classify import chain_of


def drop_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Forget gradients: those of a broken step are of no step."""
    of_groups = (p for group in optimizer.param_groups for p in group["params"])
    for parameter in (*model.parameters(), *of_groups):
        parameter.grad = None


def free_frames(error: BaseException) -> None:
    """Let go of what the broken step's functions held: its activations, most of all.

    An error that was raised by waiting for a torch.futures.Future is kept by it in a cycle that the
    collector does not see (torch 2.13), and with it each frame that it came through.
    """
    for each in chain_of(error):
        traceback.clear_frames(each.__traceback__)  # leaves those alone that still run
