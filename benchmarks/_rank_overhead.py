"""A rank that trains the same model in turns through the Session and without it, and times both.

Arguments: folder, size, pairs, steps per block. Rank r writes DIR/times<r>.json. Both models have
their own optimizer and their own DDP; process, process group, cores and caches are the same, so
that what differs is what the Session does. Both write the loss of every step to a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from _progress import Progress

progress = Progress(sys.argv[1], int(os.environ["RANK"]))
progress.tell("up")

from _task import BATCH_SIZE, PlainSampler, Task
from torch.nn.parallel import DistributedDataParallel

from rekindle.training.torch import Session, Step, StepSampler

WARM_UP = 10  # blocks
TIMED_STEPS = 200

Block = Callable[[], None]


def main() -> None:
    folder, size, pairs, length = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])
    task, plain = Task(size), Task(size)
    sampler = StepSampler(len(task.windows), BATCH_SIZE)
    with Session(model=task.model, optimizer=task.optimizer, sampler=sampler, ddp=True) as session:
        steps = session.steps((WARM_UP + pairs) * length + TIMED_STEPS)
        with (folder / f"losses{session.rank}").open("wb", buffering=0) as losses:
            blocks = (
                plain_block(plain, length, losses.fileno(), session),
                session_block(task, length, steps, session),
            )
            for turn in range(WARM_UP):
                timed_pair(blocks, turn)
            progress.tell("begin")
            times = [timed_pair(blocks, turn) for turn in range(pairs)]
            progress.tell("end")
        own = [own_work(task, step, session) for step in steps]
        session_rank = session.rank
    result = {"pairs": times, "own_us": own}
    (folder / f"times{session_rank}.json").write_text(json.dumps(result))
    progress.tell("written")


def plain_block(task: Task, length: int, losses: int, session: Session) -> Block:
    """Steps as a script without Rekindle does them."""
    model = DistributedDataParallel(task.model)
    sampler = PlainSampler(len(task.windows), session.rank, session.world_size)
    numbers = iter(range(10**9))

    def block() -> None:
        for _ in range(length):
            number = next(numbers)
            loss = task.forward(model, sampler.indices(number))
            record = {"step": number, "at": time.time(), "loss": loss.item()}
            os.write(losses, json.dumps(record).encode() + b"\n")
            task.update(loss)

    return block


def session_block(task: Task, length: int, steps: Iterator[Step], session: Session) -> Block:
    """The same through the Session."""

    def block() -> None:
        for _ in range(length):
            with next(steps) as step:
                loss = task.forward(session.model, step.indices)
                step.log(loss=loss)
                task.update(loss)

    return block


def timed_pair(blocks: tuple[Block, Block], turn: int) -> tuple[float, float, float, float]:
    """Seconds of plain and Session block, then their CPU seconds; each comes first in turn."""
    seconds, cpu = [0.0, 0.0], [0.0, 0.0]
    for which in (0, 1) if turn % 2 else (1, 0):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        blocks[which]()
        seconds[which] = time.perf_counter() - begin
        cpu[which] = time.process_time() - begin_cpu
    return seconds[0], seconds[1], cpu[0], cpu[1]


def own_work(task: Task, step: Step, session: Session) -> dict[str, float]:
    """One step; the CPU microseconds of this thread inside the Session's own calls."""
    clock, spent = time.thread_time_ns, {}
    begin = clock()
    step.__enter__()
    spent["begin"] = clock() - begin
    begin = clock()
    indices = step.indices
    spent["indices"] = clock() - begin
    loss = task.forward(session.model, indices)
    begin = clock()
    step.log(loss=loss)
    spent["log"] = clock() - begin
    task.update(loss)
    begin = clock()
    step.__exit__(None, None, None)
    spent["end"] = clock() - begin
    begin = clock()
    empty = clock() - begin
    return {name: max(0.0, (ns - empty) / 1000) for name, ns in spent.items()}


if __name__ == "__main__":
    main()
