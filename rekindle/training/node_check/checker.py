"""The process that checks one device: does what its agent says, until that closes the line.

It is forked as a rank would be, with a rank's environment. One that has failed ends: what a failed
collective leaves behind is nobody's business then, and the agent starts another.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NoReturn

import msgspec
from torch._C._distributed_c10d import TCPStore  # torch.distributed's; typed only there

from rekindle import names
from rekindle.recovery.node_check.unmeasured import lacks_memory
from rekindle.runtime.channel import MAX_MESSAGE
from rekindle.runtime.check_messages import Done, Meet, Open, Task, Work
from rekindle.training.node_check import work
from rekindle.training.node_check.device import Bench, bench_for, stress
from rekindle.training.torch_group import Group, store_at

NAME = "rekindle-check"  # in lists of processes
# Of torch, a library below it, or the host; torch.OutOfMemoryError is a RuntimeError.
_FAILURES = (RuntimeError, MemoryError, OSError)
_TASK: msgspec.msgpack.Decoder[Task] = msgspec.msgpack.Decoder(Task)


def main() -> None:
    """Open the device, and work."""
    Path("/proc/self/comm").write_text(NAME)
    line = socket.socket(fileno=int(os.environ[names.ENV_CHANNEL_FD]))
    local_rank = int(os.environ["LOCAL_RANK"])
    try:
        bench = bench_for(local_rank)
    except _FAILURES as error:
        _fail(line, 0, error)
    store = _host_store() if local_rank == 0 else None
    line.send(msgspec.msgpack.encode(Open(port=store.port if store else 0)))
    while data := line.recv(MAX_MESSAGE):
        task = _TASK.decode(data)
        used = bench.lighter() if task.beside_ranks else bench
        try:
            done = _work(local_rank, used, task) if isinstance(task, Work) else _meet(used, task)
        except _FAILURES as error:
            _fail(line, task.serial, error)
        line.send(msgspec.msgpack.encode(done))
    os._exit(0)  # the threads of a store would wait for its clients


def _work(local_rank: int, bench: Bench, task: Work) -> Done:
    seconds = work.alone(bench)
    # It wants more memory than ranks leave, and must not change the voltage that they work at.
    note = "" if task.beside_ranks else stress(local_rank)
    return Done(serial=task.serial, seconds=seconds, note=note)


def _meet(bench: Bench, task: Meet) -> Done:
    group = Group()
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
    # Not where it fails: what has gone wrong is said before others notice, and say what they see.
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


def _fail(line: socket.socket, serial: int, error: Exception) -> NoReturn:
    lines = f"{type(error).__name__}: {str(error).strip()}".splitlines()
    # What libraries say of memory may stand below what they were at.
    text = next(filter(lacks_memory, lines), lines[0])
    line.send(msgspec.msgpack.encode(Done(serial=serial, error=text)))
    os._exit(1)


if __name__ == "__main__":
    main()
