"""A rank that measures how long each way to save its state stops training.

Arguments: folder, megabytes, rounds. The ways take turns, so that changes of the machine's load
affect all of them. All ranks hold the same state, as in data-parallel training. Rank 0 does
torch.save, and DCP divides the work. The other ranks wait, as they would before their next step.
Rank 0 writes DIR/stalls.json.
"""

# ruff: noqa: E402

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from _progress import Progress

progress = Progress(sys.argv[1], int(os.environ["RANK"]))
progress.tell("up")  # before torch is imported

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _flash import Flash, is_installed

from rekindle.checkpoints.open_store import open_store
from rekindle.names import ENV_CHECKPOINT_STORE
from rekindle.training.torch import Session
from rekindle.training.torch.state.snapshot import load_snapshot

TENSOR_MEGABYTES = 4
ADAM = 3  # a parameter and its two moments
POLL_S = 0.01
MOST_STEPS, STEP_S = 100_000, 0.1  # STEP_S: the length of a step whose checkpoint is skipped
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


class Weights(torch.nn.Module):
    """A third of `megabytes`, in tensors of a large model's size; Adam holds the rest."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        count = max(1, megabytes // ADAM // TENSOR_MEGABYTES)
        numbers = megabytes * 1_000_000 // ADAM // 4 // count
        self.tensors = torch.nn.ParameterList(torch.ones(numbers) for _ in range(count))


def keep_freed_memory() -> None:
    """Keep freed memory in the process: otherwise the next free() takes longer to return it."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the maximum
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def main() -> None:
    keep_freed_memory()
    folder, megabytes, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model = Weights(megabytes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with Session(model=model, optimizer=optimizer, ignore=["saver", "seconds"]) as session:
        saver = Saver(folder / "peers", model, optimizer)
        seconds: dict[str, list[float]] = {}
        for step in session.steps(MOST_STEPS):
            with step:
                dist.barrier()
                begin = time.perf_counter()
            took = {"rekindle": time.perf_counter() - begin}
            if longest(session._loop._snapshot_schedule._missed_checkpoint):
                # The agent still makes the memory for the first checkpoint; training continues.
                seconds.setdefault("rekindle_left_out", []).append(longest(took["rekindle"]))
                time.sleep(STEP_S)
                continue
            wait_committed(session.finished)
            took |= saver.peers()
            took["restore_memory"] = restore(session)
            for name, second in took.items():
                seconds.setdefault(name, []).append(longest(second))
            if len(seconds["rekindle"]) > rounds:
                break
        if dist.get_rank() == 0:
            found = {"bytes": saver.bytes, "tensors": len(saver.tensors), "seconds": seconds}
            (folder / "stalls.json").write_text(json.dumps(found))
            saver.close()
    progress.tell("written")


def restore(session: Session) -> float:
    """Return the seconds in which this rank takes its state from its agent; about 0: it has none.

    If all ranks hold the same state, one rank of each node keeps it at its agent.
    """
    member, named = session._loop.member, session._loop.generations.named
    assert member is not None
    dist.barrier()
    begin = time.perf_counter()
    if os.environ["LOCAL_RANK"] == "0":
        load_snapshot(member.channel, session.slot, named, (session.finished, 1))
    return time.perf_counter() - begin


def longest(seconds: float) -> float:
    """Return the maximum over all ranks: the next step begins when the last rank is ready."""
    number = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def wait_committed(step: int) -> None:
    """Wait until this step's checkpoint is in the store, so that no write disturbs the others."""
    find = open_store(os.environ[ENV_CHECKPOINT_STORE]).find
    while find(step, 1) is None:  # generation 1: there was no fault
        time.sleep(POLL_S)
    dist.barrier()


class Saver:
    """The other ways to save, each measured from its call until training could continue."""

    def __init__(
        self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._folder = folder
        self._model, self._optimizer = model, optimizer
        states = [state for each in optimizer.state.values() for state in each.values()]
        self.tensors = [*(p.detach() for p in model.parameters()), *states]
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)
        self._copies = [torch.empty_like(tensor) for tensor in self.tensors]
        self._group = dist.new_group(backend="gloo")  # for async_save's own thread
        self._flash = Flash(folder / "flash") if is_installed() else None

    def peers(self) -> dict[str, float]:
        """Return the seconds of each way."""
        took = {
            "memcpy": self._time(self._copy),
            "torch_save": self._time(self._torch_save),
            "dcp_save": self._time(self._dcp_save),
            "dcp_async_save": self._time(self._dcp_async_save, self._end_async),
        }
        if self._flash is not None:
            took["dlrover_flash"] = self._time(self._flash_save, self._end_flash)
        return took

    def close(self) -> None:
        """Remove all saved files."""
        if self._flash is not None:
            self._flash.close()
        shutil.rmtree(self._folder)

    def _time(self, save: Callable[[Path], Any], end: Callable[[Any], None] | None = None) -> float:
        dist.barrier()
        place = self._folder / save.__name__
        begin = time.perf_counter()
        under_way = save(place)
        took = time.perf_counter() - begin
        if end is not None:
            end(under_way)
        dist.barrier()
        if dist.get_rank() == 0 and place.exists():
            shutil.rmtree(place)
        return took

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _copy(self, place: Path) -> None:
        torch._foreach_copy_(self._copies, self.tensors)

    def _torch_save(self, place: Path) -> None:
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
            torch.save(self._state(), place / "state.pt")
        dist.barrier()

    def _dcp_save(self, place: Path) -> None:
        dcp.save(self._state(), checkpoint_id=place)

    def _dcp_async_save(self, place: Path) -> Any:
        return dcp.async_save(self._state(), checkpoint_id=place, process_group=self._group)

    def _flash_save(self, place: Path) -> None:
        assert self._flash is not None
        self._flash.save(self._state())

    def _end_flash(self, _: None) -> None:
        assert self._flash is not None
        self._flash.wait()

    def _end_async(self, under_way: Future[Any]) -> None:
        under_way.result()


if __name__ == "__main__":
    main()
