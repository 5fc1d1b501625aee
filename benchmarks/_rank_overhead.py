"""A rank that trains a model alternately with and without the Session, and measures both.

Arguments: folder, size, seconds, steps per block, steps to watch closely, and what the Session is
compared with: a plain script, or a Session without digests. The size `habits` is another model.
Rank r writes FOLDER/times<r>.json. Both ways use the same model, DDP wrapper and optimizer, in one
process: between two copies of a model the place in memory causes a difference of up to a percent.
Both ways write the loss of every step to a file.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from _progress import Progress

progress = Progress(sys.argv[1], int(os.environ["RANK"]))
progress.tell("up")  # before torch is imported

import torch
import torch.distributed as dist
from _habits_task import HabitsTask
from _task import BATCH_SIZE, PlainSampler, Task

from rekindle.training.torch import Session, Step, StepSampler
from rekindle.training.torch.state.capture import capture

WARM_UP = 100  # steps of each block, but no more than 10 pairs
ASK_EVERY = 5  # pairs between two checks of the clock, in which all ranks take part
NO_DIGESTS = "no-digests"

Block = Callable[[], None]
Pair = tuple[float, float, float, float]


def main() -> None:
    folder, size = Path(sys.argv[1]), sys.argv[2]
    seconds, length, watched_count = map(int, sys.argv[3:6])
    against = sys.argv[6]
    task = HabitsTask() if size == "habits" else Task(size)
    sampler = StepSampler(len(task.windows), BATCH_SIZE)
    objects = {"model": task.model, "optimizer": task.optimizer, "extra": task.beside}
    with Session(**objects, sampler=sampler, ddp=True) as session:
        steps = session.steps(10**9)
        rank = session.rank
        with (folder / f"losses{rank}").open("wb", buffering=0) as losses:
            plain = Plain(task, session, losses.fileno())
            ours = session_block(task, length, steps, session)
            if against == NO_DIGESTS:
                blocks = (partial(without_digests, ours, session), ours)
            else:
                blocks = (partial(plain.steps, length), ours)
            for turn in range(min(10, WARM_UP // length)):
                timed_pair(blocks, turn)
            progress.tell("begin")
            pairs = timed_pairs(blocks, seconds)
            progress.tell("end")
            watched = watched_steps(watched_count, task, plain, steps, session)
        (folder / f"times{rank}.json").write_text(json.dumps({"pairs": pairs, **watched}))
        progress.tell("written")
        dist.barrier()  # the end of a rank would break the others' last step


class Plain:
    """The training of a script without Rekindle."""

    def __init__(self, task: Task | HabitsTask, session: Session, losses: int) -> None:
        self._task, self._session, self._losses = task, session, losses
        self._sampler = PlainSampler(len(task.windows), session.rank, session.world_size)
        self._hooks = task.optimizer._optimizer_step_pre_hooks  # only the Session's
        self._number = 0

    def steps(self, count: int) -> None:
        """Do `count` steps without the Session."""
        with self.alone():
            for _ in range(count):
                loss = self._task.forward(self._session.model, self.indices())
                self.log(loss)
                self._task.update(loss)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Do the updates of the block without the hooks of the Session."""
        hooks = self._hooks.copy()
        self._hooks.clear()
        yield
        self._hooks.update(hooks)

    def indices(self) -> list[int]:
        """Return the samples of the next step."""
        self._number += 1
        return self._sampler.indices(self._number)

    def log(self, loss: torch.Tensor) -> None:
        """Write a line for this step."""
        record = {"step": self._number, "at": time.time(), "loss": loss.item()}
        os.write(self._losses, json.dumps(record).encode() + b"\n")


def without_digests(block: Block, session: Session) -> None:
    """Run a block whose Session compares no digests."""
    digests = session._loop.generations.digests
    digests._alone = True
    block()
    digests._alone = False


def session_block(
    task: Task | HabitsTask, length: int, steps: Iterator[Step], session: Session
) -> Block:
    """Return a function that does the same steps through the Session."""

    def block() -> None:
        for _ in range(length):
            with next(steps) as step:
                loss = task.forward(session.model, step.indices)
                step.log(loss=loss)
                task.update(loss)

    return block


def timed_pairs(blocks: tuple[Block, Block], seconds: int) -> list[Pair]:
    """Return the times of pairs of blocks, measured until the time is over."""
    pairs: list[Pair] = []
    until = time.monotonic() + seconds
    while True:
        pairs += [timed_pair(blocks, turn) for turn in range(ASK_EVERY)]
        up = torch.tensor([time.monotonic() > until])
        dist.broadcast(up, src=0)
        if up:
            return pairs


def timed_pair(blocks: tuple[Block, Block], turn: int) -> Pair:
    """Return the seconds of the plain and the Session block, then their CPU seconds.

    The order of the two blocks alternates.
    """
    seconds, cpu = [0.0, 0.0], [0.0, 0.0]
    for which in (0, 1) if turn % 2 else (1, 0):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        blocks[which]()
        seconds[which] = time.perf_counter() - begin
        cpu[which] = time.process_time() - begin_cpu
    return seconds[0], seconds[1], cpu[0], cpu[1]


def watched_steps(
    count: int, task: Task | HabitsTask, plain: Plain, steps: Iterator[Step], session: Session
) -> dict[str, object]:
    """Measure single steps: the CPU microseconds of the Session's own work in each.

    It also measures the plain script's work for the same parts. For comparison with a plain copy of
    the state's size, it measures the time from the body's end to the next step. This time includes
    the snapshot, if one is due.
    """
    tensors = list(capture(session._loop.generations.named).tensors.values())
    source = torch.ones(sum(t.nbytes for t in tensors), dtype=torch.uint8)
    target = torch.zeros_like(source)
    own, same, ends = [], [], []
    for _ in range(count):
        same.append(watched_plain_step(task, plain, session))
        parts, end = watched_step(task, steps, session)
        begin = time.perf_counter()
        target.copy_(source)
        own.append(parts)
        ends.append((end, time.perf_counter() - begin))
    sizes = {"bytes": source.nbytes, "tensors": len(tensors)}
    return {"own_us": own, "plain_us": same, "ends": ends, **sizes}


def watched_plain_step(task: Task | HabitsTask, plain: Plain, session: Session) -> dict[str, float]:
    watch = Watch()
    with watch.part("indices"):
        indices = plain.indices()
    loss = task.forward(session.model, indices)
    with watch.part("log"):
        plain.log(loss)
    with plain.alone():
        task.update(loss)
    return watch.spent


def watched_step(
    task: Task | HabitsTask, steps: Iterator[Step], session: Session
) -> tuple[dict[str, float], float]:
    watch = Watch()
    with watch.part("begin"):
        step = next(steps)
        step.__enter__()
    with watch.part("indices"):
        indices = step.indices
    loss = task.forward(session.model, indices)
    with watch.part("log"):
        step.log(loss=loss)
    task.update(loss)
    begin = time.perf_counter()
    with watch.part("end"):
        step.__exit__(None, None, None)
    return watch.spent, time.perf_counter() - begin


class Watch:
    """CPU microseconds of this thread, by part, without the time of an empty part."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        with self.part("empty"):
            pass
        self._empty = self.spent.pop("empty")

    _empty = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.thread_time_ns()
        yield
        self.spent[name] = (time.thread_time_ns() - begin) / 1000 - self._empty


if __name__ == "__main__":
    main()
