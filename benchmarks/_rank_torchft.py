"""A rank of a torchft user's script: a replica group of one, which a peer resets after its end.

Arguments: folder, size, steps. The incarnation of a step is torchft's quorum. All gradients are
reduced as one tensor. With the hook of torchft 0.2's DistributedDataParallel, a rank that loses a
peer fails an assertion in torch 2.13, and also ends.
"""

# ruff: noqa: E402

import os
import sys

from _progress import Progress

rank = int(os.environ["REPLICA_GROUP_ID"])
progress = Progress(sys.argv[1], rank)
progress.tell("up")  # before torch is imported

from datetime import timedelta
from typing import Any

import torch
from _common import RANKS
from _task import PlainSampler, Task
from torchft import Manager, Optimizer, ProcessGroupGloo

COLLECTIVE, MANAGER = timedelta(seconds=5), timedelta(seconds=30)  # as in torchft's train_ddp.py


def main() -> None:
    task = Task(sys.argv[2])
    parts = {"model": task.model, "optimizer": task.optimizer, **task.beside}

    def state_dict() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    progress.tell("ready")
    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE),
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        min_replica_size=2,
        timeout=MANAGER,
        replica_id=f"replica{rank}",
    )
    parameters = list(task.model.parameters())
    optimizer = Optimizer(manager, task.optimizer)
    sampler = PlainSampler(len(task.windows), rank, RANKS)
    while manager.current_step() < int(sys.argv[3]):
        progress.pace()
        step = manager.current_step()
        optimizer.zero_grad()  # requests the quorum
        task.forward(task.model, sampler.indices(step)).backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        manager.allreduce(flat).wait()
        pieces = flat.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad.copy_(piece.view_as(parameter))
        optimizer.step()  # asks all groups whether to commit
        if manager.current_step() > step:
            task.update_table()
            progress.tell("step", manager.current_step(), manager._quorum_id)


if __name__ == "__main__":
    main()
