"""Check one device with PyTorch: CPU, CUDA, or Ascend NPU through torch-npu.

A device with wrong results is faulty, at any speed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed's; typed only there

from rekindle import names
from rekindle.protocol.node_check import DeviceWork, Done, Meet
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.training.node_check.serving import (
    ONES,
    WINDOWS,
    WrongResultError,
    better,
    serve,
    timed,
)
from rekindle.training.torch.groups.generation_group import Group, store_at

_PASSED, _SICK = 0, 2  # answers of stress_detect
_PIECE = 1 << 22  # numbers per comparison


class SickDeviceError(RuntimeError):
    """The device's own diagnosis has found a hardware fault."""


class Bench(NamedTuple):
    """A device, and the work for its measurement; by default, an accelerator's work.

    size: rows and columns of the matrices. dtype: the type of their elements. copied, sent: bytes
    of a copy in memory, and of a collective. backend: for collectives. wait: waits until all work
    is done.
    window_s: the shortest duration of one measurement, in seconds.
    """

    device: torch.device
    backend: str
    wait: Callable[[], None]
    size: int = 8192
    dtype: torch.dtype = torch.bfloat16
    copied: int = 1 << 30
    sent: int = 64 << 20
    window_s: float = 0.2

    def lighter(self) -> Bench:
        """Return work with little memory, for a device whose memory is used by ranks.

        The copy is still larger than a device's caches.
        """
        if self.device.type == "cpu":
            return self
        return self._replace(size=4096, copied=128 << 20, sent=8 << 20)


def bench_for(local_rank: int) -> Bench:
    """Return the measurement for this local rank's device; without accelerators, for the CPU.

    An accelerator's work is large enough to keep it busy. It is small compared with DLRover's 500
    products of 16,384 rows: a window of each kind has the same length on any device.
    Raises RuntimeError: the device cannot be used.
    """
    npu = _npu()
    if npu is not None:
        npu.set_device(local_rank)
        device = torch.device("npu", local_rank)
        return Bench(device, "hccl", lambda: npu.synchronize(local_rank))
    if torch.cuda.is_available():
        there = torch.cuda.device_count()
        if local_rank >= there:
            needed = f"GPU {local_rank}, as local rank {local_rank} needs it"
            raise RuntimeError(f"torch finds {there} GPUs here, and not {needed}")
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        return Bench(device, "nccl", lambda: torch.cuda.synchronize(device))
    torch.set_num_threads(1)  # the same for each node, regardless of other work on the machine
    return Bench(
        device=torch.device("cpu"),
        backend="gloo",
        wait=lambda: None,
        size=256,
        dtype=torch.float32,
        copied=8 << 20,
        sent=1 << 20,
        window_s=0.02,
    )


def stress(local_rank: int) -> str:
    """Run an NPU's own diagnosis if torch_npu has one; return why it gave no result, or "".

    torch_npu.npu.stress_detect() answers 0 if the device passed, and 2 if the hardware is faulty.
    It answers 1 if it could not run, for example because its 10 GB of memory are not free. Source:
    torch_npu/npu/utils.py, and its page in Ascend's reference.
    Raises SickDeviceError: the hardware is faulty; RuntimeError: the diagnosis could not restore
    the voltage that it changed.
    """
    npu = _npu()
    detect = getattr(npu, "stress_detect", None)
    if detect is None:
        return ""
    found = detect()
    if found == _SICK:
        raise SickDeviceError(f"stress_detect of NPU {local_rank} finds its hardware faulty")
    return "" if found == _PASSED else f"stress_detect did not run (it returned {found})"


def _npu() -> Any:
    """Return torch_npu's module; None: there is no NPU."""
    npu = getattr(torch, "npu", None)
    return npu if npu is not None and npu.is_available() else None


class TorchKit:
    """Makes products and copies on the device, and collectives in the default process group."""

    def __init__(self, local_rank: int) -> None:
        """Open the device. Raises RuntimeError: it cannot be used."""
        self._local_rank = local_rank
        self._bench = bench_for(local_rank)
        self._store = _host_store() if local_rank == 0 else None

    @property
    def port(self) -> int:
        """The port of this checker's store if it is the first one of its node; 0 otherwise."""
        return self._store.port if self._store else 0

    def _bench_of(self, task: DeviceWork | Meet) -> Bench:
        return self._bench.lighter() if task.beside_ranks else self._bench

    def work(self, task: DeviceWork) -> Done:
        """Measure the device alone."""
        seconds = alone(self._bench_of(task))
        # The stress test needs more memory than ranks leave, and it changes the voltage for the
        # ranks.
        note = "" if task.beside_ranks else stress(self._local_rank)
        return Done(serial=task.serial, seconds=seconds, note=note)

    def meet(self, task: Meet) -> Done:
        """Measure collectives with others."""
        bench, group = self._bench_of(task), Group()
        group.form(
            store=store_at(task.host, task.port),
            generation=task.serial,
            rank=task.rank,
            world_size=task.world_size,
            backend=bench.backend,
            timeout_s=task.timeout_s,
            device_id=None if bench.device.type == "cpu" else bench.device,
        )
        seconds = together(bench)
        # Not after a failure: this rank reports its failure before others see closed connections,
        # and report those.
        group.leave()
        return Done(serial=task.serial, seconds={task.part: seconds})


def _host_store() -> TCPStore:
    """Host a store at which other nodes' checkers meet."""
    listener = socket.create_server(("", 0), backlog=64)
    return TCPStore(
        names.LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def alone(bench: Bench) -> dict[Measurement, float]:
    """Measure the device alone: the seconds of one product, and of one copy.

    Raises WrongResultError, and torch's RuntimeError: the device fails.
    """
    return {Measurement.COMPUTE: _compute(bench), Measurement.MEMORY: _memory(bench)}


def _compute(bench: Bench) -> float:
    chance = torch.Generator().manual_seed(20)
    left = torch.zeros(bench.size, bench.size)
    columns = torch.rand(bench.size, bench.size, generator=chance).topk(ONES, dim=1).indices
    left.scatter_(1, columns, 1.0)
    right = torch.randint(-1, 2, (bench.size, bench.size), generator=chance).float()
    # Freivalds' check: A (B x) = (A B) x, with ones for x; all numbers are exact.
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
    for first in range(0, count, _PIECE):  # pieces: the pattern would need the memory again
        piece = copy[first : first + _PIECE]
        if not torch.equal(piece, torch.arange(first, first + len(piece), device=bench.device)):
            raise WrongResultError("a copy in memory has wrong values")
    return seconds


def together(bench: Bench) -> float:
    """Measure the default process group: seconds of an all-gather, an all-reduce and a transfer.

    Raises WrongResultError, and torch's RuntimeError: the others are unreachable.
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
    """Exchange values between the ranks of the default process group, new ones in each exchange.

    So an earlier exchange's values cannot pass as the newest exchange's values.
    """

    def __init__(self, bench: Bench) -> None:
        self._wait = bench.wait
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._lap = 0
        self._own = torch.full((bench.sent // 4,), float(self._rank + 1), device=bench.device)
        self._gathered = [torch.empty_like(self._own) for _ in range(self._world_size)]
        self._summed = torch.empty_like(self._own)
        self._received = torch.empty_like(self._own)
        # The peer is the same device in the other half of the ranks: the other node of a pair.
        self._peer = (self._rank + self._world_size // 2) % self._world_size

    def renew(self) -> None:
        """Change the values to send: small integers, whose sums are exact."""
        self._lap += 1
        self._own.fill_(self._of(self._rank))
        self._wait()

    def once(self) -> None:
        """Send and receive, and wait until that is done."""
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
        """Compare all received values. Raises WrongResultError."""
        sent = [self._of(rank) for rank in range(self._world_size)]
        right = all(map(_is_all, self._gathered, sent)) and _is_all(self._summed, sum(sent))
        if not right:
            raise WrongResultError("a collective returned wrong values")
        if self._has_peer and not _is_all(self._received, sent[self._peer]):
            raise WrongResultError("a transfer returned wrong values")

    @property
    def _has_peer(self) -> bool:
        return self._world_size % 2 == 0

    def _of(self, rank: int) -> float:
        return float(rank + 1 + self._lap)


def _is_all(values: torch.Tensor, expected: float) -> bool:
    return bool((values == expected).all())


if __name__ == "__main__":
    serve(TorchKit)
