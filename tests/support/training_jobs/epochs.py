"""A script with epochs, in which ranks die at named places.

DEATHS: the places, `RANK PLACE` by comma; a rank dies at each of them once. VARIED: each rank has
another seed, and all ranks also evaluate between two batches. WORKERS: the persistent workers of
the loader. Arguments: the epochs, and the step
before which all ranks raise an error.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from rekindle.training.torch import Session

DEATHS = "EPOCHS_DEATHS"
VARIED = "EPOCHS_VARIED"
WORKERS = "EPOCHS_WORKERS"
EPOCHS, BATCHES, BATCH = 3, 4, 4
RANK = int(os.environ.get("RANK", "0"))


def at(place: str) -> None:
    """Die, if a death waits here."""
    deaths = os.environ.get(DEATHS, "").split(",")
    if f"{RANK} {place}" in deaths:
        try:
            os.close(os.open(f"died-{RANK}-{place}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def evaluate(model: torch.nn.Module, inputs: torch.Tensor, when: int | str) -> float:
    """Return a value that all ranks compute together. when: an epoch, or another name of a time."""
    at(f"evaluate {when}")
    model.eval()
    with torch.no_grad():
        total = model(inputs).square().sum()
    torch.distributed.all_reduce(total)
    at(f"evaluated {when}")
    model.train()
    return float(total)


def main(epochs: int, last: int = -1) -> None:
    """Train, and write the values of each epoch."""
    varied = VARIED in os.environ
    torch.manual_seed(1 + RANK * varied)
    random.seed(1)
    inputs = torch.randn(BATCHES * BATCH, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    workers = int(os.environ.get(WORKERS, "0"))
    loader = DataLoader(
        data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    count = {"batches": 0}
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with Session(**objects, ddp=True, extra={"count": count}) as session:
        session.run(evaluate, session.model, inputs, -1)
        for epoch in session.epochs(epochs):
            at(f"opening {epoch}")
            random.random()
            total = 0.0
            for x, y in session.batches(loader):
                number = session.finished
                at(f"before {number}")
                if number == last:
                    raise KeyError("enough")
                count["batches"] += 1
                draw = random.random()
                with session.step() as step:
                    at(f"block {number}")
                    loss = torch.nn.functional.mse_loss(session.model(x), y)
                    rate = scheduler.get_last_lr()[0]
                    step.log(loss=loss, rate=rate, draw=draw, count=count["batches"], total=total)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    total += loss.item() * (1 + RANK)
                at(f"after {number}")
                if varied and number % 3 == 1:
                    total += session.run(evaluate, session.model, inputs, f"between {number}")
            at(f"closing {epoch}")
            scheduler.step()
            session.run(evaluate, session.model, inputs, epoch)
            at(f"returned {epoch}")
        score = session.run(evaluate, session.model, inputs, epochs)
        at("end")
    state = [float(each.double().sum()) for each in model.state_dict().values()]
    found = [score, state, optimizer.param_groups[0]["lr"], count]
    Path(f"end-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
