"""A rank that trains alternately with light profiling off and on, and measures both.

Arguments: folder, size, seconds, steps per block. Rank r writes FOLDER/times<r>.json. The records
are encoded and written at the end of each block, within its time. A background write would occur
at any time, and would count for the block in which it falls.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from _progress import Progress

progress = Progress(sys.argv[1], int(os.environ["RANK"]))
progress.tell("up")  # before torch is imported
os.environ["REKINDLE_PROFILING_FLUSH_S"] = "3600"

import torch
import torch.distributed as dist
from _task import BATCH_SIZE, Task

from rekindle.profiling.switch import Switch, switched
from rekindle.protocol.rank import Profile, Settings
from rekindle.training.torch import Session, StepSampler

MODES = {
    "off": Profile(),
    "off again": Profile(),
    "on": Profile(switch=switched(Switch(), (), on=True), since=1),
    "with communication": Profile(switch=switched(Switch(), ("communication",), on=True), since=1),
}
WARM_UP = 3  # turns


def main() -> None:
    folder, size = Path(sys.argv[1]), sys.argv[2]
    seconds, length = map(int, sys.argv[3:5])
    task = Task(size)
    sampler = StepSampler(len(task.windows), BATCH_SIZE)
    turns: list[dict[str, tuple[float, float]]] = []  # seconds, and CPU seconds
    with Session(model=task.model, optimizer=task.optimizer, sampler=sampler, ddp=True) as session:
        steps = session.steps(10**9)

        def train(count: int) -> None:
            for _ in range(count):
                with next(steps) as step:
                    loss = task.forward(session.model, step.indices)
                    step.log(loss=loss)
                    task.update(loss)

        def block(mode: str) -> tuple[float, float]:
            session._loop.member.channel.settings = Settings(profile=MODES[mode])
            train(1)  # a change of the mode takes effect in this step
            write()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            train(length)
            write()
            return time.perf_counter() - begin, time.process_time() - begin_cpu

        def write() -> None:
            if session._loop._profiler._writer is not None:
                session._loop._profiler._writer._flush()

        until, up = time.monotonic() + seconds, torch.tensor([False])
        while not up:
            order = random.Random(len(turns)).sample(list(MODES), len(MODES))
            turns.append({mode: block(mode) for mode in order})
            up = torch.tensor([time.monotonic() > until])
            dist.broadcast(up, src=0)
        (folder / f"times{session.rank}.json").write_text(json.dumps(turns[WARM_UP:]))
        progress.tell("written")
        dist.barrier()


if __name__ == "__main__":
    main()
