"""A Session that raises an error in a late step, unless a file exists; it makes the file first."""

import sys
from pathlib import Path

import torch

from rekindle.training.torch import Session

once = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(12):
        if step.number == 9 and not once.exists():
            once.touch()
            raise ValueError("shard 7 is damaged")
        with step:
            loss = session.model(torch.ones(2, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
