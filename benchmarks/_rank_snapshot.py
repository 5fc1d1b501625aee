"""A rank that times its snapshots against plain copies of the same bytes.

Arguments: folder, size of the model or megabytes, times. Prints nothing; writes DIR/snapshots.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from _progress import Progress

progress = Progress(sys.argv[1], int(os.environ["RANK"]))
progress.tell("up")

import torch
from _task import BATCH_SIZE, Task

from rekindle.training.torch import Session
from rekindle.training.torch_state import capture

PAUSE_S = 0.002  # per megabyte: the agent checks the sum of the last one meanwhile


class Bytes(torch.nn.Module):
    """So many megabytes of parameters, in tensors as a large model has them."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        count = max(1, megabytes // 4)
        numbers = megabytes * 1_000_000 // 4 // count
        self.tensors = torch.nn.ParameterList(torch.ones(numbers) for _ in range(count))


def main() -> None:
    folder, what, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model, optimizer = training(what)
    seconds: list[tuple[float, float]] = []
    with Session(model=model, optimizer=optimizer) as session:
        tensors = list(capture(session.named).tensors.values())
        total = sum(tensor.nbytes for tensor in tensors)
        source = torch.ones(total, dtype=torch.uint8)
        target = torch.zeros(total, dtype=torch.uint8)
        for step in session.steps(times + 3):  # the first ones make the buffers
            begin = time.perf_counter()
            with step:
                pass
            middle = time.perf_counter()
            target.copy_(source)
            seconds.append((middle - begin, time.perf_counter() - middle))
            time.sleep(PAUSE_S * max(1.0, total / 1e6))
        result = {
            "bytes": total,
            "tensors": len(tensors),
            "skipped": session._snapshots.skipped if session._snapshots else 0,
            "seconds": seconds[3:],
        }
    (folder / "snapshots.json").write_text(json.dumps(result))
    progress.tell("written")


def training(what: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The example's model with its optimizer's state, or megabytes of parameters without any."""
    if what.isdigit():
        model = Bytes(int(what))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    task = Task(what)
    task.update(task.forward(task.model, list(range(BATCH_SIZE))))
    return task.model, task.optimizer


if __name__ == "__main__":
    main()
