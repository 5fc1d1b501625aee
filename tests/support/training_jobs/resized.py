"""A run that continues with another number of ranks. The samples of a step are always the same.

The run uses no random numbers, so that its losses are also the same, except for rounding in sums.
After each step, and at the start of each attempt, it records the complete state of all ranks.
Variants: `ddp`, and `fsdp` (FSDP2).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rekindle.training.torch import Session, StepSampler, init_placeholder_group
from training_jobs import LENGTH

GLOBAL_BATCH = 24  # samples of a step over all ranks
FEATURES = 16


class Block(nn.Module):
    """A block with shards of different sizes, and a parameter with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 37), nn.Linear(37, FEATURES)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale[0]


def make(variant: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, which is the same on all ranks, and its optimizer."""
    if variant == "fsdp":
        init_placeholder_group()
    torch.manual_seed(7)
    model = nn.Sequential(Block(), Block(), nn.Linear(FEATURES, 1))
    if variant == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        for block in model[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(value: Any) -> Any:
    """Return a state with digests instead of tensors.

    All ranks must call this for sharded tensors.
    """
    if isinstance(value, dict):
        return {str(key): whole(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [whole(each) for each in value]
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
    return value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", choices=("ddp", "fsdp"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--hold", type=int, default=-1, help="stay in this step")
    options = parser.parse_args()
    model, optimizer = make(options.variant)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    world = int(os.environ["WORLD_SIZE"])
    sampler = StepSampler(LENGTH, GLOBAL_BATCH // world, seed=3)
    inputs = torch.randn(LENGTH, FEATURES, generator=torch.Generator().manual_seed(1))
    targets = inputs.sin().sum(1, keepdim=True)
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}

    def note(what: str) -> None:
        state = {name: whole(thing.state_dict()) for name, thing in named.items()}
        if session.rank == 0:
            path = options.folder / f"{what}-{session.finished}-of-{world}.json"
            path.write_text(json.dumps(state))

    session = Session(**named, ddp=options.variant == "ddp", seed=11)
    with session:
        note("loaded")
        for step in session.steps(options.steps):
            with step:
                while step.number == options.hold:
                    time.sleep(0.05)
                chosen = step.indices
                loss = (session.model(inputs[chosen]) - targets[chosen]).square().mean()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                step.log(loss=mean / world, samples=chosen)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
            note("done")


if __name__ == "__main__":
    main()
