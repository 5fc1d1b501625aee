"""A small run of two ranks whose script changes its state in the ways that scripts do.

The variants:

`state`: a kept parameter group, a scheduler that steps before the update, a meter, a replay buffer,
an environment, a moving average, a momentum encoder, and an evaluation that a fault may interrupt.
`scaler`, `scaler-clip`: `torch.amp.GradScaler`, without and with an explicit `unscale_` and
clipping. `scaler-fsdp`: the same with FSDP2. A step overflows, so that the scaler leaves it out.
`accumulate`: gradients of two blocks for each update.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rekindle.training.torch import Session, StepSampler, init_placeholder_group
from training_jobs import BATCH, LENGTH
from training_jobs.injection import HiccupError, Injector

WIDTH = 16
LARGE = 40_000  # elements of a tensor that is too large for a copy without need


class Encoder(nn.Module):
    """A network with a slow copy of its first layer, which the forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.slow = copy.deepcopy(self.first).requires_grad_(False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return self.last(self.dropout(torch.relu(self.first(x)) + self.slow(x)))


class Meter:
    """A running mean, and the last values."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0
        self.last: list[float] = []

    def see(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1
        self.last.append(value)
        del self.last[:-3]

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count, self.last = state["total"], state["count"], state["last"]


class Replay:
    """A ring of samples in one large tensor."""

    def __init__(self) -> None:
        self.rows, self.next = torch.zeros(LARGE // WIDTH, WIDTH), 0

    def put(self, rows: torch.Tensor) -> None:
        self.rows[self.next : self.next + len(rows)] = rows
        self.next += len(rows)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.next = state["rows"], state["next"]


class Environment:
    """A chaotic number that each step moves on."""

    value = 0.3

    def move(self) -> float:
        self.value = 3.9 * self.value * (1 - self.value)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Run:
    """The training objects of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.variant = options.variant
        self.rank = int(os.environ["REKINDLE_SLOT"])
        self.faults = Injector(options.folder, self.rank)
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(LENGTH, WIDTH, generator=generator)
        self.targets = self.inputs.sin().sum(1, keepdim=True)
        self.make()

    def make(self) -> None:
        self.network: nn.Module = Encoder()
        self.fsdp = self.variant == "scaler-fsdp"
        if self.fsdp:
            init_placeholder_group()
            self.network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
            fully_shard(self.network)
        parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        self.group = self.optimizer.param_groups[0]
        self.groups = self.optimizer.param_groups
        self.scheduler: Any = None
        self.extra: dict[str, Any] = {}
        self.losses: dict[int, float] = {}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def train(self) -> None:
        if self.variant == "state":
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
            self.rates = self.scheduler.base_lrs
            average = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.meter, self.replay, self.environment = Meter(), Replay(), Environment()
            self.average, self.last = average, self.meter.last
            self.extra = {
                "average": average,
                "meter": self.meter,
                "replay": self.replay,
                "environment": self.environment,
            }
        elif self.variant.startswith("scaler"):
            self.extra = {"scaler": self.scaler}
        session = Session(
            model=self.network,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=StepSampler(LENGTH, BATCH, seed=3),
            extra=self.extra,
            seed=11,
            ddp=not self.fsdp,
            transient=(HiccupError,),
            ignore=("self.losses",),  # a record of this process
        )
        self.faults.watch(session._loop.member)
        step_of = {"state": self.step_state, "accumulate": self.step_accumulating}
        with session:
            for step in session.steps(self.options.steps):
                self.faults.step = step.number
                with step:
                    step_of.get(self.variant, self.step_scaled)(session, step)
        self.leave_result()

    def loss_of(self, session: Session, step: Any) -> torch.Tensor:
        chosen = step.indices
        loss = (session.model(self.inputs[chosen]) - self.targets[chosen]).square().mean()
        self.losses[step.number] = loss.item()
        step.log(loss=loss, pid=os.getpid())
        return loss

    def step_state(self, session: Session, step: Any) -> None:
        if step.number % 3 == 0:
            session.model.eval()
            with torch.no_grad():
                self.network(self.inputs[:4])
                self.faults.at("evaluate")
            session.model.train()
        self.group["lr"] *= 1 + 0.01 * self.environment.move()
        self.scheduler.step()
        self.replay.put(self.inputs[4 * step.number :][:4])  # all ranks have the same rows
        loss = self.loss_of(session, step) * (1 + self.replay.rows.mean())
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.meter.see(mean.item())
        self.optimizer.zero_grad()
        self.faults.at("forward")
        loss.backward()
        self.faults.at("backward")
        self.optimizer.step()
        self.faults.at("update")
        self.average.update_parameters(self.network)
        self.faults.at("last line")

    def step_scaled(self, session: Session, step: Any) -> None:
        self.optimizer.zero_grad()
        loss = self.loss_of(session, step)
        if step.number % 5 == 3:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        self.faults.at("backward")
        if self.variant != "scaler":
            self.scaler.unscale_(self.optimizer)
            self.faults.at("unscaled")
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        else:
            self.faults.at("unscaled")
        self.scaler.step(self.optimizer)
        self.faults.at("update")
        self.scaler.update()
        self.faults.at("last line")

    def step_accumulating(self, session: Session, step: Any) -> None:
        last = step.number % 2 == 1
        with contextlib.nullcontext() if last else session.model.no_sync():
            self.loss_of(session, step).backward()
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def leave_result(self) -> None:
        result: dict[str, Any] = {
            "network": digest(self.network.state_dict()),
            "optimizer": digest(self.optimizer.state_dict()["state"]),
            "kept group": self.group is self.optimizer.param_groups[0],
            "kept groups": self.groups is self.optimizer.param_groups,
            "rate": self.optimizer.param_groups[0]["lr"],
            "scale": self.scaler.get_scale(),
            "modes": [module.training for module in self.network.modules()],
        }
        if self.scheduler is not None:
            result |= {
                "scheduler": self.scheduler.last_epoch,
                "kept rates": self.rates is self.scheduler.base_lrs,
                "kept last": self.last is self.meter.last,
            }
        result |= {name: digest(thing.state_dict()) for name, thing in self.extra.items()}
        result["losses"] = self.losses
        Path(self.options.folder, f"result-{self.rank}.json").write_text(json.dumps(result))


def digest(state: Any) -> str:
    """Return a digest of a state."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            local = value.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            found.update(local.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--steps", type=int, required=True)
    Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()
