"""A small run whose ranks have state of their own.

The Session recognizes the statistics of BatchNorm. The script declares in `per_rank` a module that
sees the batches of one rank, generators that each rank seeds with its number, and an environment,
which also moves after the update.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rekindle.training.torch import Session, StepSampler
from training_jobs import BATCH, LENGTH
from training_jobs.habits import WIDTH, Environment, digest
from training_jobs.injection import HiccupError, Injector


class Run:
    """The training objects of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = int(os.environ["REKINDLE_SLOT"])
        self.faults = Injector(options.folder, self.rank)
        torch.manual_seed(7)
        draw = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(LENGTH, WIDTH, generator=draw)
        self.targets = self.inputs.sin().sum(1, keepdim=True)
        self.network = nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)),
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Flatten(),
            nn.Linear(96, WIDTH),
            nn.BatchNorm1d(WIDTH, momentum=None),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )
        self.observer = nn.BatchNorm1d(WIDTH, affine=False)  # sees the rank's own batches
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.01)
        self.noise = torch.Generator().manual_seed(100 + self.rank)
        self.scale = np.random.default_rng(200 + self.rank)
        self.environment = Environment()
        self.environment.value = 0.2 + 0.1 * self.rank
        self.alone: dict[str, Any] = {
            "noise": self.noise,
            "scale": self.scale,
            "observer": self.observer,
            "environment": self.environment,
        }

    def train(self) -> None:
        session = Session(
            model=self.network,
            optimizer=self.optimizer,
            sampler=StepSampler(LENGTH, BATCH, seed=3),
            per_rank=self.alone,
            seed=11,
            ddp={"forward_sync_buffers": False},
            transient=(HiccupError,),
        )
        self.faults.watch(session._loop.member)
        with session:
            for step in session.steps(self.options.steps):
                self.faults.step = step.number
                with step:
                    self.step(session, step)
        result = {
            "network": digest(self.network.state_dict()),
            "optimizer": digest(self.optimizer.state_dict()["state"]),
            "observer": digest(self.observer.state_dict()),
            "noise": digest(self.noise.get_state()),
            "scale": repr(self.scale.bit_generator.state),
            "environment": self.environment.value,
        }
        Path(self.options.folder, f"result-{self.rank}.json").write_text(json.dumps(result))

    def step(self, session: Session, step: Any) -> None:
        noise = torch.randn(BATCH, WIDTH, generator=self.noise) * float(self.scale.random())
        inputs = self.inputs[step.indices] + 0.1 * noise
        self.observer(inputs)
        inputs = inputs * (1 + 0.1 * self.environment.move())
        loss = (session.model(inputs) - self.targets[step.indices]).square().mean()
        # The buffers of this rank alone, as they are in this step.
        buffers = digest(dict(self.network.named_buffers()) | dict(self.observer.named_buffers()))
        step.log(loss=loss, buffers=buffers, pid=os.getpid())
        self.optimizer.zero_grad()
        self.faults.at("forward")
        loss.backward()
        self.faults.at("backward")
        self.optimizer.step()
        self.faults.at("update")
        self.environment.move()
        self.faults.at("last line")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--steps", type=int, required=True)
    Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()
