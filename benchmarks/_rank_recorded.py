"""A rank whose steps are recorded, with the same work in each step. Arguments: gate, steps."""

import sys
import time
from pathlib import Path

import torch

from rekindle.training.torch import Session

WIDTH, BATCH = 256, 64


def main() -> None:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(BATCH, WIDTH)
    with Session(model=model, optimizer=optimizer, ddp=True) as session:
        for step in session.steps(int(sys.argv[2])):
            while step.number == 1 and not Path(sys.argv[1]).exists():
                time.sleep(0.01)
            with step:
                optimizer.zero_grad()
                session.model(inputs).square().mean().backward()
                optimizer.step()


if __name__ == "__main__":
    main()
