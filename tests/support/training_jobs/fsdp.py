"""The run with a model of FSDP2, sharded over all ranks (`fsdp`) or replicated twice (`hsdp`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rekindle.training.torch import init_placeholder_group
from training_jobs.injection import Injector
from training_jobs.train import FEATURES, WIDTH, Run


class Block(nn.Module):
    """A residual block with fault places in its forward and backward pass."""

    def __init__(self, number: int, faults: Injector) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.ones(3))  # fewer rows than ranks, so one rank has none
        self._number, self._faults = number, faults

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._faults.at(f"forward {self._number}")
        if x.requires_grad:
            x.register_hook(lambda _: self._faults.at(f"backward {self._number}"))
        hidden = self.dropout(torch.relu(self.up(self.norm(x))))
        return x + self.down(hidden) * self.scale[self._number]


class Optimizer(torch.optim.AdamW):
    """AdamW with a fault place at the start of its update."""

    def __init__(self, model: nn.Module, faults: Injector) -> None:
        self._faults = faults
        super().__init__(model.parameters(), lr=1e-2, weight_decay=0.1)

    def _init_group(self, group, *lists):  # step() calls this
        self._faults.at("update")
        return super()._init_group(group, *lists)


class FsdpRun(Run):
    """The training objects and the loop of one rank."""

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        init_placeholder_group()
        world = dist.get_world_size()
        if self.options.variant == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        blocks = [Block(number, self.faults) for number in range(3)]
        # With 101 rows, the shards have different sizes.
        model = nn.Sequential(
            nn.Linear(FEATURES, 101), nn.Linear(101, WIDTH), *blocks, nn.Linear(WIDTH, 1)
        )
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, Optimizer(model, self.faults)

    def session_options(self) -> dict[str, Any]:
        return {}
