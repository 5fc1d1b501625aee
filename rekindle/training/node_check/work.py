"""What is measured, and whether the results are right: a device that computes wrongly is faulty."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from rekindle.recovery.node_check.evidence import Part
from rekindle.training.node_check.device import Bench

WINDOWS = 5
_ONES = 64  # in each row: sums of as many are exact in every type that a device multiplies


class WrongResultError(RuntimeError):
    """A device has computed or copied wrongly."""


def alone(bench: Bench) -> dict[Part, float]:
    """Measure the device by itself: seconds of one product, and of one copy.

    Raises WrongResultError, and torch's RuntimeError: the device cannot do it.
    """
    return {Part.COMPUTE: _compute(bench), Part.MEMORY: _memory(bench)}


def _compute(bench: Bench) -> float:
    chance = torch.Generator().manual_seed(20)
    left = torch.zeros(bench.size, bench.size)
    columns = torch.rand(bench.size, bench.size, generator=chance).topk(_ONES, dim=1).indices
    left.scatter_(1, columns, 1.0)
    right = torch.randint(-1, 2, (bench.size, bench.size), generator=chance).float()
    # Freivalds: A (B x) = (A B) x, here with ones for x; all of it exact.
    expected = left.double() @ right.double().sum(1)
    a, b = (each.to(bench.device, bench.dtype) for each in (left, right))
    product = torch.empty_like(a)
    seconds = timed(bench, lambda: torch.mm(a, b, out=product))
    if not torch.equal(product.cpu().double().sum(1), expected):
        raise WrongResultError("a product of matrices is wrong")
    return seconds


def _memory(bench: Bench) -> float:
    count = bench.copied // 8
    pattern = torch.arange(count, dtype=torch.int64, device=bench.device)
    copy = torch.empty_like(pattern)
    seconds = timed(bench, lambda: copy.copy_(pattern))
    if not torch.equal(copy, torch.arange(count, dtype=torch.int64, device=bench.device)):
        raise WrongResultError("what was copied in memory is wrong")
    return seconds


def together(bench: Bench) -> float:
    """Measure the default process group: seconds of an all-gather, an all-reduce and a transfer.

    Raises WrongResultError, and torch's RuntimeError: the others cannot be reached.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = torch.full((bench.sent // 4,), float(rank + 1), device=bench.device)
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    summed = torch.empty_like(own)
    received = torch.empty_like(own)
    # With the same device of the other half, which is the other node in a pair.
    peer = (rank + world_size // 2) % world_size

    def exchange() -> None:
        summed.copy_(own)
        dist.all_gather(gathered, own)
        dist.all_reduce(summed)
        if world_size % 2 == 0:
            transfers = [
                dist.P2POp(dist.isend, own, peer),
                dist.P2POp(dist.irecv, received, peer),
            ]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()

    exchange()
    bench.wait()
    expected = world_size * (world_size + 1) / 2
    right = all(bool((each == index + 1).all()) for index, each in enumerate(gathered))
    if not right or not bool((summed == expected).all()):
        raise WrongResultError("a collective has brought wrong values")
    laps = []
    for _ in range(2 * WINDOWS):
        dist.barrier()
        began = time.perf_counter()
        exchange()
        bench.wait()
        laps.append(time.perf_counter() - began)
    return statistics.quantiles(laps, n=4)[0]


def timed(bench: Bench, once: Callable[[], object]) -> float:
    """Return the seconds of doing something once, in the better of some windows.

    What slows a device for good slows each window; what else the machine does, does not.
    """
    once()
    bench.wait()
    laps = []
    for _ in range(WINDOWS):
        began, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < bench.window_s:
            for _ in range(4):
                once()
            count += 4
            bench.wait()
        laps.append(passed / count)
    return statistics.quantiles(laps, n=4)[0]
