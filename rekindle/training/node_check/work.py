"""What is measured, and whether the results are right: a device that computes wrongly is faulty."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from rekindle.recovery.node_check.evidence import Measurement
from rekindle.training.node_check.serving import ONES, WINDOWS, WrongResultError, better, timed
from rekindle.training.node_check.torch_device import Bench

_PIECE = 1 << 22  # numbers that are compared at a time


def alone(bench: Bench) -> dict[Measurement, float]:
    """Measure the device by itself: seconds of one product, and of one copy.

    Raises WrongResultError, and torch's RuntimeError: the device cannot do it.
    """
    return {Measurement.COMPUTE: _compute(bench), Measurement.MEMORY: _memory(bench)}


def _compute(bench: Bench) -> float:
    chance = torch.Generator().manual_seed(20)
    left = torch.zeros(bench.size, bench.size)
    columns = torch.rand(bench.size, bench.size, generator=chance).topk(ONES, dim=1).indices
    left.scatter_(1, columns, 1.0)
    right = torch.randint(-1, 2, (bench.size, bench.size), generator=chance).float()
    # Freivalds: A (B x) = (A B) x, here with ones for x; all of it exact.
    expected = left.double() @ right.double().sum(1)
    a, b = (each.to(bench.device, bench.dtype) for each in (left, right))
    product = torch.empty_like(a)
    seconds = timed(lambda: torch.mm(a, b, out=product), bench.wait, bench.window_s)
    if not torch.equal(product.cpu().double().sum(1), expected):
        raise WrongResultError("a product of matrices is wrong")
    return seconds


def _memory(bench: Bench) -> float:
    count = bench.copied // 8
    pattern = torch.arange(count, dtype=torch.int64, device=bench.device)
    copy = torch.empty_like(pattern)
    seconds = timed(lambda: copy.copy_(pattern), bench.wait, bench.window_s)
    for first in range(0, count, _PIECE):  # all at once would need as much memory again
        piece = copy[first : first + _PIECE]
        if not torch.equal(piece, torch.arange(first, first + len(piece), device=bench.device)):
            raise WrongResultError("what was copied in memory is wrong")
    return seconds


def together(bench: Bench) -> float:
    """Measure the default process group: seconds of an all-gather, an all-reduce and a transfer.

    Raises WrongResultError, and torch's RuntimeError: the others cannot be reached.
    """
    exchange = _Exchange(bench)
    exchange.once()
    exchange.check()
    laps = []
    for _ in range(2 * WINDOWS):
        exchange.renew()
        dist.barrier()
        began = time.perf_counter()
        exchange.once()
        laps.append(time.perf_counter() - began)
        exchange.check()
    return better(laps)


class _Exchange:
    """What the ranks of the default process group send each other: other values each time.

    So what an earlier exchange has brought is never taken for what the last one has.
    """

    def __init__(self, bench: Bench) -> None:
        self._wait = bench.wait
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._lap = 0
        self._own = torch.full((bench.sent // 4,), float(self._rank + 1), device=bench.device)
        self._gathered = [torch.empty_like(self._own) for _ in range(self._world_size)]
        self._summed = torch.empty_like(self._own)
        self._received = torch.empty_like(self._own)
        # With the same device of the other half, which is the other node in a pair.
        self._peer = (self._rank + self._world_size // 2) % self._world_size

    def renew(self) -> None:
        """Have other values to send: small whole numbers, whose sums are exact."""
        self._lap += 1
        self._own.fill_(self._of(self._rank))
        self._wait()

    def once(self) -> None:
        """Send and receive, until it is done."""
        self._summed.copy_(self._own)
        dist.all_gather(self._gathered, self._own)
        dist.all_reduce(self._summed)
        if self._has_peer:
            transfers = [
                dist.P2POp(dist.isend, self._own, self._peer),
                dist.P2POp(dist.irecv, self._received, self._peer),
            ]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        self._wait()

    def check(self) -> None:
        """Compare all that has come. Raises WrongResultError."""
        sent = [self._of(rank) for rank in range(self._world_size)]
        right = all(map(_is_all, self._gathered, sent)) and _is_all(self._summed, sum(sent))
        if not right:
            raise WrongResultError("a collective has brought wrong values")
        if self._has_peer and not _is_all(self._received, sent[self._peer]):
            raise WrongResultError("a transfer has brought wrong values")

    @property
    def _has_peer(self) -> bool:
        return self._world_size % 2 == 0

    def _of(self, rank: int) -> float:
        return float(rank + 1 + self._lap)


def _is_all(values: torch.Tensor, expected: float) -> bool:
    return bool((values == expected).all())
