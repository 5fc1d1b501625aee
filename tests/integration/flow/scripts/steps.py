"""A Session of a tiny model: until a file exists, its steps are slow and the last one waits."""

import sys
import time
from pathlib import Path

import torch

from rekindle.training.torch import Session

gate, total = Path(sys.argv[1]), int(sys.argv[2])
pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.05
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(total):
        while step.number == total - 1 and not gate.exists():
            time.sleep(0.05)
        with step:
            if not gate.exists():
                time.sleep(pause_s)
            loss = session.model(torch.ones(2, 4) * (session.rank + 1)).square().mean()
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
