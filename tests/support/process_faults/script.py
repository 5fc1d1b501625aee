"""A script that trains a tiny model, and waits at gates which the test has closed.

A gate is closed while the file `closed-NAME` exists in the folder of the first argument. A rank
that waits there has written the file `at-NAME-RANK`. `pid-RANK` has the process id of the rank.
"""

import os
import sys
import time
from pathlib import Path

import torch

from rekindle.training.torch import Session

FOLDER = Path(sys.argv[1])
STEPS, LATE = 40, 38
RANK = os.environ["RANK"]


def gate(name: str) -> None:
    """Wait while the gate is closed."""
    closed = FOLDER / f"closed-{name}"
    if closed.exists():
        unfinished = FOLDER / f".at-{name}-{RANK}-{os.getpid()}"
        unfinished.write_text(str(os.getpid()))
        unfinished.rename(FOLDER / f"at-{name}-{RANK}")
    while closed.exists():
        time.sleep(0.01)


(FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
gate("start")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(STEPS):
        if step.number == LATE:
            gate("late")
        with step:
            seed = torch.Generator().manual_seed(10 * step.number + session.rank)
            loss = session.model(torch.randn(8, 4, generator=seed)).pow(2).mean()
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.02)
gate("end")
digest = [parameter.double().sum().item() for parameter in model.parameters()]
(FOLDER / f"digest-{RANK}").write_text(repr(digest))
