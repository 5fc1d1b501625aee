"""Waits for an operation that gloo has forgotten, because its peer died half-way through it."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import Rank, formed, seconds_until, started
from torch import nn

from rekindle.errors import StaleError
from rekindle.training.torch_ddp import wrap_ddp

SOON_S = 5.0  # some 100 ms are expected; a busy machine may need more
ELEMENTS = 1 << 26  # more than any socket takes at once


def begun(rank: Rank, value: torch.Tensor, *, stops: bool) -> None:
    """Both have posted the operation; stop rank 1 when a part of the bytes has come over."""
    if stops:
        while not value[:: 1 << 14].any():
            pass
        os.kill(int(rank.store.get("pid1")), signal.SIGSTOP)
    if rank.rank == 0:
        rank.tell("begun")


def _send(rank: Rank, value: torch.Tensor) -> None:
    work = dist.isend(value, 1) if rank.rank == 0 else dist.irecv(value, 0)
    begun(rank, value, stops=rank.rank == 1)
    work.wait()


def _receive(rank: Rank, value: torch.Tensor) -> None:
    value.sub_(1.0)  # what rank 1 sends is not zero, what rank 0 has is
    work = dist.irecv(value, 1) if rank.rank == 0 else dist.isend(value, 0)
    begun(rank, value, stops=rank.rank == 0)
    work.wait()


def _all_reduce(rank: Rank, value: torch.Tensor) -> None:
    work = dist.all_reduce(value, async_op=True)
    begun(rank, value, stops=rank.rank == 1)
    work.wait()


def _backward(rank: Rank, value: torch.Tensor) -> None:
    def hook(_, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        begun(rank, bucket.buffer(), stops=rank.rank == 1)
        return work.get_future().then(lambda done: done.value()[0])

    model = wrap_ddp(nn.Linear(1, ELEMENTS, bias=False), existing=None)
    model.register_comm_hook(None, hook)
    model(value[:1]).sum().backward()


OPERATIONS = {
    "send": _send,
    "receive": _receive,
    "all-reduce": _all_reduce,
    "backward": _backward,
}


def _is_broken_off(rank: Rank, operation: str) -> float:
    group = formed(rank)
    severed_at = []

    def control() -> None:
        rank.hear()
        severed_at.append(time.monotonic())
        group.sever()

    rank.store.set(f"pid{rank.rank}", str(os.getpid()))
    value = torch.full((ELEMENTS,), float(1 - rank.rank))
    if rank.rank == 0:
        threading.Thread(target=control, daemon=True).start()
    with pytest.raises((StaleError, RuntimeError)):  # some, gloo does not forget
        OPERATIONS[operation](rank, value)
    woken_at = time.monotonic()
    group.leave()
    return woken_at - severed_at[0]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_forgotten_operation_is_given_up_when_the_generation_ends(operation: str):
    """The peer died with the operation half-way: gloo would wait for its time-out."""
    with started(_is_broken_off, 2, operation) as ranks:
        assert ranks.hear(0) == "begun"
        seconds_until(lambda: psutil.Process(ranks.pid(1)).status() == psutil.STATUS_STOPPED)
        ranks.kill(1)
        ranks.tell(0, "sever")
        assert ranks.result(0) < SOON_S
