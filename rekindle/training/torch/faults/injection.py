"""Inject faults into a PyTorch rank at the coordinator's request (`rekindle inject`).

A fault that breaks the process or its node occurs as the step begins. An injected exception comes
from inside the step's body, like a real one: when the model's forward pass begins, or after the
optimizer's update.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.rank.injection import break_process, due

_RAISED: dict[InjectionKind, Callable[[str], Exception]] = {
    InjectionKind.EXCEPTION: lambda text: RuntimeError(f"an exception was {text}"),
    InjectionKind.OOM: lambda text: torch.OutOfMemoryError(f"out of memory was {text}"),
    InjectionKind.UCE: lambda text: RuntimeError(f"UCE ERROR {text}"),
    InjectionKind.TORN_UPDATE: lambda text: RuntimeError(f"UCE ERROR {text} inside the update"),
}


def inject(
    faults: list[Inject], step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Inject those of `faults` that are due in `step`, and remove them from the list."""
    for fault, text in due(faults, step):
        match fault.kind:
            case InjectionKind.HANG_COLLECTIVE:
                _wait_for_nobody(next((p.device for p in model.parameters()), torch.device("cpu")))
            case InjectionKind.HANG_DATA:
                _wait_for_data()
            case InjectionKind.TORN_UPDATE:
                _once(optimizer.register_step_post_hook, _RAISED[fault.kind](text))
            case _ if not break_process(fault):
                _once(model.register_forward_pre_hook, _RAISED[fault.kind](text))


def _wait_for_nobody(device: torch.device) -> None:
    """Receive from the next rank, which sends nothing: it waits for this rank in a collective."""
    received = torch.empty(1, device=device)
    dist.recv(received, src=(dist.get_rank() + 1) % dist.get_world_size())
    received.item()  # a GPU only queues the receive before this call


def _wait_for_data() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Dry(Dataset[int]):
        """A data set whose source gives nothing."""

        def __getitem__(self, index: int) -> int:
            os.read(os.pipe()[0], 1)
            return index

        def __len__(self) -> int:
            return 1

    next(iter(DataLoader(Dry(), num_workers=1)))


def _once(register: Callable[..., torch.utils.hooks.RemovableHandle], error: Exception) -> None:
    def strike(*_: object) -> None:
        handle.remove()
        raise error

    handle = register(strike)
