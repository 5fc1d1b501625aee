"""A small data-parallel run with all kinds of state, for fault tests.

The variants:

`ddp`: DDP with several buckets.
`plain`: The script all-reduces its gradients.
`late`: The same, with one more collective after the update, as in a script that logs its mean loss.
`parts`: The global batch stays the same when the world shrinks.
`sharded`, `hybrid`, `one`: The state is in shards, see training_jobs.sharded.
`fsdp`, `hsdp`: The same with FSDP2, see training_jobs.fsdp.
`zero`: Only the optimizer's state is in shards, see training_jobs.zero.
`map-0`, `stream-2` and others: Batches from a loader with this number of workers, see
training_jobs.loaders.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rekindle.training.torch import Recovery, Session, StepSampler
from training_jobs import BATCH, LENGTH
from training_jobs.injection import HiccupError, Injector

FEATURES, WIDTH = 16, 64
LOADERS = ("map", "kept", "stream", "torchdata", "stateful")


class Network(nn.Module):
    """A regression model with dropout, and a fault place in the middle of its backward pass."""

    def __init__(self, faults: Injector, *, statistics: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH, track_running_stats=statistics)
        self.first = nn.Sequential(nn.Linear(FEATURES, WIDTH), norm)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, 1)
        self._faults = faults

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._faults.at("backward"))
        return self.last(self.dropout(self.middle(hidden)))


class Optimizer(torch.optim.AdamW):
    """AdamW with two groups, and a fault place between the updates of the first and the second."""

    def __init__(self, model: Network, faults: Injector) -> None:
        self._faults = faults
        first = [*model.first.parameters(), *model.last.parameters()]
        groups = [{"params": first}, {"params": [*model.middle.parameters()], "lr": 2e-3}]
        super().__init__(groups, lr=1e-2, weight_decay=0.1)

    def _init_group(self, group, *lists):  # step() calls this for each group
        if group is self.param_groups[1]:
            self._faults.at("update")
        return super()._init_group(group, *lists)


class Average:
    """A moving average of the parameters: state that the script itself keeps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = [parameter.detach().clone() for parameter in model.parameters()]
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        for value, parameter in zip(self.values, self._model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self):
        return {"updates": self.updates, "values": self.values}

    def load_state_dict(self, state) -> None:
        self.updates = state["updates"]
        for value, other in zip(self.values, state["values"], strict=True):
            value.copy_(other)


class Run:
    """The training objects and the loop of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        # The rank in the full world. Without Rekindle there is only one world.
        self.rank = int(os.environ.get("REKINDLE_SLOT") or os.environ.get("RANK", "0"))
        self.faults = Injector(options.folder, self.rank)
        self.faults.at("start")
        torch.manual_seed(7)
        self.network, self.optimizer = self.make()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=7, gamma=0.5)
        self.sampler = StepSampler(LENGTH, BATCH, seed=3)
        self.average = Average(self.network)
        self.losses: dict[int, float] = {}
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(LENGTH, FEATURES, generator=generator)
        self.targets = self.inputs.sin().sum(1, keepdim=True)

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        # Without DDP a lost node would return all ranks to a snapshot, because of the statistics.
        network = Network(self.faults, statistics=self.options.variant not in ("plain", "late"))
        return network, Optimizer(network, self.faults)

    def session_options(self) -> dict[str, Any]:
        variant = self.options.variant
        ddp = {"bucket_cap_mb": 0.01} if variant in ("ddp", "parts") else False
        return {"ddp": ddp, "keep_global_batch": variant == "parts"}

    def train(self) -> None:
        session = Session(
            model=self.network,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=self.sampler,
            extra={"average": self.average},
            seed=11,
            transient=(HiccupError,),
            on_recovery=say_recovery,
            ignore=("self.losses",),  # a record of this process
            **self.session_options(),
        )
        if not self.options.plain_runtime:
            self.faults.watch(session._loop.member)
            self.faults.watch_runtime()
        with session:
            for step in session.steps(self.options.steps):
                self.faults.step = step.number
                self.faults.at("between")
                with step:
                    if self.options.variant == "parts":
                        self.one_step_in_parts(session, step)
                    else:
                        self.one_step(session, step)
                with session.phase("evaluate"):
                    self.faults.at("evaluate")
                if self.faults.leaves:
                    break
            self.faults.at("dismissed")
        self.faults.at("end")
        self.leave_result()

    def vary_step(self) -> None:
        """Compute and sleep for the times that the environment sets.

        SHORTEST_STEP_S: sleep for one to ten times as long, at random. PRODUCT_S: compute a product
        and sleep for this time, and for `more_s`.
        """
        shortest_s = float(os.environ.get("SHORTEST_STEP_S", "0"))
        if shortest_s:
            time.sleep(shortest_s * 10 ** random.random())
        product_s = float(os.environ.get("PRODUCT_S", "0"))
        if product_s:
            torch.mm(self.inputs[:2], self.inputs[:2].T)  # slow on hosts that a test slows
            time.sleep(product_s + self.more_s())

    def more_s(self) -> float:
        """Return the seconds that this rank works longer than others, once MORE_FILE exists."""
        mine = os.environ.get("MORE_RANK") == str(self.rank)
        return float(os.environ["MORE_S"]) if mine and Path(os.environ["MORE_FILE"]).exists() else 0

    def loss_of(self, session: Session, chosen: list[int]) -> torch.Tensor:
        noise = 0.01 * torch.randn(len(chosen), FEATURES) + 0.001 * random.random()
        outputs = session.model(self.inputs[chosen] + noise) + self.faults.flaw
        return (outputs - self.targets[chosen]).square().mean()

    def one_step_in_parts(self, session: Session, step) -> None:
        self.faults.at("forward")
        self.optimizer.zero_grad()
        samples: list[int] = []
        self.losses[step.number] = 0.0
        for part in step.parts():
            loss = self.loss_of(session, part.indices)
            samples += part.indices
            self.losses[step.number] += loss.item()
            step.log(loss=self.losses[step.number], samples=samples, pid=os.getpid())
            (loss * part.weight).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update()

    def samples_of(self, step) -> list[int]:
        return step.indices

    def one_step(self, session: Session, step) -> None:
        self.faults.at("forward")
        self.vary_step()
        chosen = self.samples_of(step)
        loss = self.loss_of(session, chosen)
        step.log(loss=loss, samples=chosen, pid=os.getpid())
        self.losses[step.number] = loss.item()
        self.optimizer.zero_grad()
        loss.backward()
        if self.options.variant in ("plain", "late"):
            self.reduce_gradients(session.world_size)
        self.optimizer.step()
        self.scheduler.step()
        self.average.update()
        self.faults.at("updated")
        if self.options.variant == "late":
            dist.all_reduce(loss.detach())
        self.faults.at("last line")

    def reduce_gradients(self, world_size: int) -> None:
        for number, parameter in enumerate(self.network.parameters()):
            if world_size > 1:
                work = dist.all_reduce(parameter.grad, async_op=True)
                if number == 3:
                    self.faults.at("collective")
                work.wait()
            parameter.grad /= world_size

    def optimizer_state(self) -> dict[Any, Any]:
        return self.optimizer.state_dict()["state"]

    def leave_result(self) -> None:
        """Write digests of the trained state."""
        buffers = hashlib.sha256()  # apart: without an agent DDP leaves other ones on each rank
        for buffer in self.network.buffers():
            buffers.update(buffer.numpy().tobytes())
        digest = hashlib.sha256()
        state = self.optimizer_state()
        for tensor in (
            *self.network.parameters(),
            *self.average.values,
            *(value for each in state.values() for value in each.values()),
        ):
            own = tensor.detach()
            own = own.to_local() if hasattr(own, "to_local") else own
            digest.update(own.numpy().tobytes())
        result = {
            "digest": digest.hexdigest(),
            "buffers": buffers.hexdigest(),
            "position": self.sampler.position if self.sampler is not None else None,
            "rate": self.scheduler.get_last_lr(),
            "updates": self.average.updates,
            "pid": os.getpid(),
            "losses": self.losses,
        }
        Path(self.options.folder, f"result-{self.rank}.json").write_text(json.dumps(result))


def say_recovery(recovery: Recovery) -> None:
    """Write what the hook of the Session learns."""
    ranks = ",".join(map(str, recovery.ranks))
    words = (recovery.when, recovery.kind, recovery.strategy or "-", f"ranks {ranks}")
    print("recovery:", *words, file=sys.stderr, flush=True)


def run_of(options: argparse.Namespace) -> Run:
    """Return the run of this variant."""
    if options.variant in ("sharded", "hybrid", "one"):
        from training_jobs.sharded import ShardedRun

        return ShardedRun(options)
    if options.variant in ("fsdp", "hsdp"):
        from training_jobs.fsdp import FsdpRun

        return FsdpRun(options)
    if options.variant.partition("-")[0] in LOADERS:
        from training_jobs.loaders import LoaderRun

        return LoaderRun(options)
    if options.variant == "zero":
        from training_jobs.zero import ZeroRun

        return ZeroRun(options)
    return Run(options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    variants = ["ddp", "plain", "late", "parts", "sharded", "hybrid", "one", "fsdp", "hsdp", "zero"]
    variants += [f"{kind}-{workers}" for kind in LOADERS for workers in (0, 2)]
    parser.add_argument("--variant", choices=variants, default="ddp")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument(
        "--plain-runtime", action="store_true", help="no fault places outside of the script"
    )
    options = parser.parse_args()
    with (options.folder / f"stack.{os.getpid()}").open("w") as stack:  # see Job.story
        faulthandler.register(signal.SIGUSR2, file=stack)
        run_of(options).train()
        faulthandler.unregister(signal.SIGUSR2)


if __name__ == "__main__":
    main()
