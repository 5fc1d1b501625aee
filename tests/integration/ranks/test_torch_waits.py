"""Waits for an operation that gloo never completes, because the peer ended during it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import Rank, formed, run, started
from torch import nn
from waiting import wait_until

from rekindle.errors import StaleError
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank.member import free_frames
from rekindle.training.torch.groups.ddp import wrap_ddp

FOREVER_S = 1e6  # a time-out of gloo that is longer than the test
ELEMENTS = 1 << 26  # more than a socket takes in one call


def begun(rank: Rank, value: torch.Tensor, *, stops: bool) -> None:
    """Report the operation; stop rank 1 after some of its bytes have arrived."""
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
    value.sub_(1.0)  # rank 1 then sends -1, and rank 0 has 0
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


def _is_broken_off(rank: Rank, operation: str) -> None:
    group = formed(rank, timeout_s=FOREVER_S)

    def control() -> None:
        rank.hear()
        group.sever()

    rank.store.set(f"pid{rank.rank}", str(os.getpid()))
    value = torch.full((ELEMENTS,), float(1 - rank.rank))
    severing = threading.Thread(target=control, daemon=True)
    if rank.rank == 0:
        severing.start()
    with pytest.raises((StaleError, RuntimeError)):  # gloo itself ends some operations
        OPERATIONS[operation](rank, value)
    severing.join()  # gloo may have ended the operation before the test severs the group
    group.leave()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_forgotten_operation_is_given_up_when_the_generation_ends(operation: str):
    """If a peer ends during an operation, the end of the generation ends the wait.

    Gloo alone would wait until its time-out.
    """
    with started(_is_broken_off, 2, operation) as ranks:
        assert ranks.hear(0) == "begun"
        stopped = psutil.Process(ranks.pid(1))
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the stop of rank 1")
        ranks.kill(1)
        ranks.tell(0, "sever")
        ranks.returned(0)  # long before the time-out of gloo


def _shows_its_waits(rank: Rank) -> tuple[list[int], tuple[int, ...]]:
    fd = HeartbeatPage.create("test")
    page = HeartbeatPage(fd)
    group = formed(rank, page=page)
    waits = [page.waiting_since_ns]
    if rank.rank == 1:
        rank.hear()  # after rank 0's page shows a wait
    value = torch.ones(4)
    work = dist.all_reduce(value, async_op=True)
    if rank.rank == 0:
        threading.Thread(target=_tell_when_waiting, args=(rank, page), daemon=True).start()
    work.wait()
    waits.append(page.waiting_since_ns)
    dist.broadcast(value, 0)
    model = wrap_ddp(nn.Linear(1, 1), existing=None)
    model(value[:1]).sum().backward()
    recent = page.recent
    group.leave()
    waits.append(page.waiting_since_ns)
    return waits, recent


def _tell_when_waiting(rank: Rank, page: HeartbeatPage) -> None:
    wait_until(lambda: page.waiting_since_ns, "a wait of rank 0")
    rank.tell("waits")


def test_an_agent_sees_who_waits_and_in_which_collectives():
    """The heartbeat page of a rank shows a wait until its peers arrive.

    All ranks have the same marks of recent collectives.
    """
    with started(_shows_its_waits, 2) as ranks:
        assert ranks.hear(0) == "waits"
        ranks.tell(1, "go on")
        (waits, recent), (_, others) = ranks.results()
    assert waits == [0, 0, 0]
    assert recent == others
    assert len(set(recent)) == 3  # an all-reduce, a broadcast, a bucket of gradients


def _marks_of_groups(rank: Rank) -> tuple[int, int]:
    page = HeartbeatPage(HeartbeatPage.create("test"))
    group = formed(rank, page=page)
    value = torch.ones(4)
    dist.all_reduce(value)
    pair = dist.new_group([0, 1])
    before = page.operations
    if rank.rank < 2:
        dist.all_reduce(value, group=pair)
        dist.all_reduce(value, group=pair, async_op=True).wait()
    own = page.operations - before
    dist.all_reduce(value)
    dist.broadcast(value, 0, group=dist.group.WORLD)
    group.leave()
    return own, page.operations - before


def test_collectives_of_some_ranks_are_not_everybodys():
    """The heartbeat page counts collectives of the whole world only.

    Collectives of some ranks would make equal ranks look different.
    """
    with started(_marks_of_groups, 3) as ranks:
        assert set(ranks.results()) == {(0, 2)}


def _gloo_threads() -> int:
    """Return the number of gloo's threads in this process."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the task has ended
            count += "gloo" in (task / "comm").read_text()
    return count


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _synchronous(_: object) -> None:
    dist.all_reduce(torch.ones(4))


def _open(_: object) -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    dist.all_reduce(torch.ones(4), async_op=True)  # nobody waits for it
    work.wait()


def _from_nobody(rank: Rank) -> None:
    dist.recv(torch.ones(4), src=1 - rank.rank)


def _in_backward(_: object) -> None:
    global _wrapper
    _wrapper = wrap_ddp(_model, existing=_wrapper)
    _wrapper(torch.ones(2, 4)).sum().backward()


_model, _wrapper = nn.Linear(4, 4), None
BROKEN = {
    "all-reduce": _synchronous,
    "open": _open,
    "receive": _from_nobody,
    "backward": _in_backward,
}
GENERATIONS, EARLY = 14, 4


def _breaks(rank: Rank, operation: Callable[[Rank], None]) -> None:
    """Break off an operation of this rank, as a Session does."""
    try:
        operation(rank)
    except (RuntimeError, StaleError) as error:
        free_frames(error)
    else:
        raise AssertionError("the operation succeeded")


def _is_broken_off_often(rank: Rank, name: str) -> None:
    early = (0, 0)
    for generation in range(GENERATIONS):
        group = formed(rank, generation)
        dist.all_reduce(torch.ones(1))  # after this the peer has formed the group
        if rank.rank == 0:
            _breaks(rank, BROKEN[name])
        group.leave()  # it ends the operation of the other rank
        if generation == EARLY:
            early = (_gloo_threads(), _descriptors())

    def as_few() -> bool:
        return _gloo_threads() <= early[0] and _descriptors() <= early[1]

    # Another thread frees the groups a little later.
    wait_until(as_few, f"an end of the growth since {early}")


@pytest.mark.parametrize("operation", BROKEN)
def test_operations_that_broke_off_leave_nothing(operation: str):
    """A rank whose operations broke off in many generations has no more threads and sockets."""
    run(_is_broken_off_often, 2, operation)
