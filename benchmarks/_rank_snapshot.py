"""A rank that times its snapshots of a large state against plain copies of the same bytes.

Arguments: folder, megabytes, times. Writes DIR/snapshots.json.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from _progress import Progress

progress = Progress(sys.argv[1], int(os.environ["RANK"]))
progress.tell("up")  # before torch is imported

import torch

from rekindle.training.torch import Session

TENSOR_MEGABYTES = 4
PAUSE_S = 0.15  # the agent computes the checksum of the last snapshot during this time
WARM_UP = 3  # the first snapshots make the buffers


class Bytes(torch.nn.Module):
    """Parameters of `megabytes`, in tensors of a large model's size."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        count = megabytes // TENSOR_MEGABYTES
        numbers = megabytes * 1_000_000 // 4 // count
        self.tensors = torch.nn.ParameterList(torch.ones(numbers) for _ in range(count))


def main() -> None:
    folder, megabytes, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model = Bytes(megabytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = sum(parameter.nbytes for parameter in model.parameters())
    source, target = (torch.ones(total, dtype=torch.uint8) for _ in range(2))
    seconds: list[tuple[float, float]] = []
    with Session(model=model, optimizer=optimizer, ignore=[seconds]) as session:
        for step in session.steps(times + WARM_UP):
            with step:
                begin = time.perf_counter()
            middle = time.perf_counter()
            target.copy_(source)
            seconds.append((middle - begin, time.perf_counter() - middle))
            time.sleep(PAUSE_S)
    # A snapshot is skipped while the agent reads its buffer, and then takes almost no time.
    taken = [pair for pair in seconds[WARM_UP:] if pair[0] > pair[1] / 5]
    result = {"bytes": total, "tensors": len(model.tensors), "ends": taken}
    (folder / "snapshots.json").write_text(json.dumps(result))
    progress.tell("written")


if __name__ == "__main__":
    main()
