"""A rank of a torchrun user's script: DDP, and resuming from a checkpoint that it writes itself.

Arguments: folder, size, steps, steps between checkpoints (0: none).
"""

# ruff: noqa: E402

import os
import sys

from _progress import Progress

progress = Progress(sys.argv[1], int(os.environ["RANK"]))
progress.tell("up")  # before torch is imported

from pathlib import Path

import torch
import torch.distributed as dist
from _task import PlainSampler, Task
from torch.nn.parallel import DistributedDataParallel


def save(task: Task, file: Path, step: int) -> None:
    state = {
        "model": task.model.state_dict(),
        "optimizer": task.optimizer.state_dict(),
        "beside": {name: thing.state_dict() for name, thing in task.beside.items()},
        "rng": torch.get_rng_state(),
        "step": step,
    }
    temporary = file.with_suffix(".new")
    torch.save(state, temporary)
    temporary.replace(file)


def resume(task: Task, file: Path) -> int:
    if not file.exists():
        return 0
    state = torch.load(file, weights_only=True)
    task.model.load_state_dict(state["model"])
    task.optimizer.load_state_dict(state["optimizer"])
    for name, thing in task.beside.items():
        thing.load_state_dict(state["beside"][name])
    torch.set_rng_state(state["rng"])
    return int(state["step"])


def main() -> None:
    folder, size, steps, every = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    file = Path(folder, "checkpoint.pt")
    incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    task = Task(size)
    finished = resume(task, file)
    progress.tell("ready")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(task.model)
    sampler = PlainSampler(len(task.windows), dist.get_rank(), dist.get_world_size())
    while finished < steps:
        progress.pace()
        task.update(task.forward(model, sampler.indices(finished)))
        finished += 1
        progress.tell("step", finished, incarnation)
        if every and finished % every == 0 and dist.get_rank() == 0:
            save(task, file, finished)
    # The end of DDP and gloo can deadlock in torch 2.13, and the benchmark does not measure that.
    os._exit(0)


if __name__ == "__main__":
    main()
