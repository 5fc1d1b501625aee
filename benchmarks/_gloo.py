"""Fork processes that meet at a store, to measure gloo alone, without a job."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

TIMEOUT = timedelta(seconds=120)
_PR_SET_PDEATHSIG = 1


def fork_ranks(ranks: int, main: Callable[[int, dist.TCPStore], None]) -> None:
    """Run `main(rank, store)` in `ranks` forked processes, and exit with 1 if one fails."""
    # A port that was free in an earlier check was at times in use when the store began to listen.
    listener = socket.create_server(("127.0.0.1", 0))
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _run(rank, ranks, listener, main)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    sys.exit(1 if failed else 0)


def _run(
    rank: int, ranks: int, listener: socket.socket, main: Callable[[int, dist.TCPStore], None]
) -> None:
    host, port = listener.getsockname()
    listening = {"master_listen_fd": listener.detach()} if rank == 0 else {}
    store = dist.TCPStore(host, port, ranks, rank == 0, TIMEOUT, **listening)
    main(rank, store)
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < ranks:
        time.sleep(0.001)
    sys.stdout.flush()
    os._exit(0)


def form(store: dist.TCPStore, name: str, rank: int, ranks: int) -> float:
    """Form the default group under its own name, on all ranks together; return the seconds."""
    store.add(name, 1)
    while store.add(name, 0) < ranks:
        time.sleep(0.001)
    begin = time.perf_counter()
    group = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=ranks, timeout=TIMEOUT)
    dist.barrier()
    return time.perf_counter() - begin
