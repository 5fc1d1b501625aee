"""Checks one device with PyTorch: CPU, CUDA, or Ascend NPU through torch-npu."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import TCPStore  # torch.distributed's; typed only there

from rekindle import names
from rekindle.protocol.node_check import DeviceWork, Done, Meet
from rekindle.training.node_check import work
from rekindle.training.node_check.serving import serve
from rekindle.training.node_check.torch_device import Bench, bench_for, stress
from rekindle.training.torch.groups.generation_group import Group, store_at


class TorchKit:
    """Products and copies on the device, collectives of the default process group."""

    def __init__(self, local_rank: int) -> None:
        """Raises RuntimeError: the device cannot be used."""
        self._local_rank = local_rank
        self._bench = bench_for(local_rank)
        self._store = _host_store() if local_rank == 0 else None

    @property
    def port(self) -> int:
        """Of the store that this checker hosts, if it is its node's first."""
        return self._store.port if self._store else 0

    def _bench_of(self, task: DeviceWork | Meet) -> Bench:
        return self._bench.lighter() if task.beside_ranks else self._bench

    def work(self, task: DeviceWork) -> Done:
        """Measure the device by itself."""
        seconds = work.alone(self._bench_of(task))
        # It wants more memory than ranks leave, and must not change the voltage that they work at.
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
        seconds = work.together(bench)
        # Not where it fails: what has gone wrong is said before others notice, and say what they
        # see.
        group.leave()
        return Done(serial=task.serial, seconds={task.part: seconds})


def _host_store() -> TCPStore:
    """Host a store that other nodes' checkers meet at."""
    listener = socket.create_server(("", 0), backlog=64)
    return TCPStore(
        names.LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


if __name__ == "__main__":
    serve(TorchKit)
