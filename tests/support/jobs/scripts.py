"""Training scripts for `rekindle run`."""

TRAINS = """
import os, time, torch
from rekindle.training.torch import Session

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(8):
        while step.number == 3 and not os.path.exists("go"):
            time.sleep(0.01)
        with step:
            loss = session.model(torch.ones(2, 4)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("step", step.number, flush=True)
"""
