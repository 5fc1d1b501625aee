"""The run with parameters and optimizer state in shards, as in FSDP and ZeRO.

The script does this without FSDP and ZeRO, so that tests see Rekindle's part alone. Each rank holds
a shard of all parameters, gathers the others before its forward pass, and keeps its shard of the
reduced gradients.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from training_jobs.injection import Injector
from training_jobs.train import FEATURES, WIDTH, Run

# for four ranks: no replica, one replica, all replicas
SHARDS = {"sharded": 4, "hybrid": 2, "one": 1}


class Gather(torch.autograd.Function):
    """Gather the shards of a group.

    The backward pass averages the gradient over all ranks and shards it.
    """

    @staticmethod
    def forward(context, own: torch.Tensor, run: ShardedRun) -> torch.Tensor:
        context.run = run
        pieces = [torch.empty_like(own) for _ in range(run.shards)]
        run.faults.at("collective")
        dist.all_gather(pieces, own, group=run.group)
        return torch.cat(pieces)

    @staticmethod
    def backward(context, gradient: torch.Tensor):
        run = context.run
        run.faults.at("backward")
        mean = gradient / dist.get_world_size()
        dist.all_reduce(mean)
        run.faults.at("reduced")
        return mean.chunk(run.shards)[run.shard].clone(), None


class Shard(nn.Module):
    """A shard of a network's parameters."""

    def __init__(self, run: ShardedRun) -> None:
        super().__init__()
        whole = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, 1)
        )
        self._run, self._whole = run, [whole]  # in a list, so that it is not part of the state
        flat = torch.cat([p.detach().flatten() for p in whole.parameters()])
        flat = nn.functional.pad(flat, (0, -len(flat) % run.shards))
        self.own = nn.Parameter(flat.chunk(run.shards)[run.shard].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        [whole] = self._whole
        named = dict(whole.named_parameters())
        sizes = [parameter.numel() for parameter in named.values()]
        flat = Gather.apply(self.own, self._run)[: sum(sizes)]
        pieces = zip(named.items(), flat.split(sizes), strict=True)
        return functional_call(whole, {name: f.view(p.shape) for (name, p), f in pieces}, (x,))


class Optimizer(torch.optim.AdamW):
    """AdamW with a fault place before it changes the parameters."""

    def __init__(self, model: Shard, faults: Injector) -> None:
        self._faults = faults
        super().__init__(model.parameters(), lr=1e-2, weight_decay=0.1)

    def _init_group(self, group, *lists):  # step() calls this
        self._faults.at("update")
        return super()._init_group(group, *lists)


class ShardedRun(Run):
    """The training objects and the loop of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.shards = SHARDS[options.variant]
        self.group: Any = None
        super().__init__(options)

    @property
    def shard(self) -> int:
        return self.rank % self.shards

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        network = Shard(self)
        return network, Optimizer(network, self.faults)

    def session_options(self) -> dict[str, Any]:
        shard: int | None = self.shard
        if self.shards == 1:
            shard = 7  # any number is valid
        if "WHOLE" in os.environ and self.rank == 1:
            shard = None
        if os.environ.get("ANOTHER_SHARD") == f"rank {self.rank}, life {self.faults.life}":
            shard = 0
        return {"shard": shard, "make_groups": self.make_groups}

    def make_groups(self) -> None:
        for first in range(0, dist.get_world_size(), self.shards):
            group = dist.new_group(list(range(first, first + self.shards)))
            if first <= self.rank < first + self.shards:
                self.group = group
