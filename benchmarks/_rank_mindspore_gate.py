"""A rank of `mindspore_retry.py`: steps with and without the gate, in blocks that take turns.

Arguments: a folder for the times of each rank, and the number of steps. It needs MindSpore. In a
block without the gate all ranks continue immediately. Each rank derives from the step's number
whether its block has the gate.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.communication import get_rank, init
from mindspore.train import Callback

from rekindle.rank.step_vote import StepVote
from rekindle.training.mindspore import Session, recoverable

BLOCK, SKIPPED = 20, 3  # steps of a block; its first SKIPPED steps are ignored
WIDTH = 512
_agree = StepVote.agree
_inside: dict[int, float] = {}  # seconds in the gate, by step


def with_gate(step: int) -> bool:
    """Return whether the step's block has the gate: on, off, off, on, and so on."""
    return (step // BLOCK) % 4 in (0, 3)


def agree(gate: StepVote, step: int, *, can: bool, **more: Any) -> bool:
    """Pass the gate, or skip it in a block without the gate."""
    if not with_gate(step):
        return can
    began = time.perf_counter()
    agreed = _agree(gate, step, can=can, **more)
    _inside[step] = time.perf_counter() - began
    return agreed


class Clock(Callback):
    """The time at which each step has ended, so that differences include the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[float] = []

    def on_train_step_end(self, run_context: object) -> None:
        run_context.original_args().net_outputs.asnumpy()
        self.ended.append(time.perf_counter())


def main() -> None:
    """Train, and write the median time of a step in each block."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    net = nn.SequentialCell(nn.Dense(64, WIDTH), nn.ReLU(), nn.Dense(WIDTH, 10))
    optimizer = recoverable(nn.Momentum)(net.trainable_params(), 0.01, 0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = ms.Model(net, loss, optimizer)
    x = np.random.RandomState(0).randn(8 * steps, 64).astype(np.float32)
    y = np.zeros(8 * steps, np.int32)
    data = ds.NumpySlicesDataset((x, y), shuffle=False).batch(8)
    StepVote.agree = agree
    clock = Clock()
    with Session(model) as session:
        session.train(1, data, callbacks=[clock])
    blocks = []
    for first in range(2 * BLOCK, steps - BLOCK + 1, BLOCK):  # it compiles in the first
        ended = clock.ended[first + SKIPPED : first + BLOCK]
        took = [b - a for a, b in itertools.pairwise(ended)]
        blocks.append((with_gate(first), statistics.median(took)))
    inside = [(step, seconds) for step, seconds in _inside.items() if step >= 2 * BLOCK]
    (folder / f"{get_rank()}.json").write_text(json.dumps({"blocks": blocks, "inside": inside}))


if __name__ == "__main__":
    main()
