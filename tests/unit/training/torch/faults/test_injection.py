"""Faults that a rank injects into itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.training.torch.faults import repairs


def test_a_rank_waits_on_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """An injected hang receives into a tensor on the model's device.

    NCCL refuses a tensor of the CPU, so the rank would fail and not hang.
    """
    received: list[torch.Tensor] = []
    waited: list[torch.Tensor] = []

    def item(tensor: torch.Tensor) -> None:
        waited.append(tensor)

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "recv", lambda tensor, src: received.append(tensor))
    monkeypatch.setattr(torch.Tensor, "item", item)
    model = nn.Linear(1, 1, device="meta")
    nothing: Any = None
    faults = [Inject(rank=1, kind=InjectionKind.HANG_COLLECTIVE)]
    repairs.inject(faults, 3, model, nothing)
    assert [tensor.device.type for tensor in received] == ["meta"]
    assert waited == received
    assert not faults
