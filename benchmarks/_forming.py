"""Prints the milliseconds that N gloo ranks take to form a group, some times over.

Arguments: ranks, times. The ranks are forked and have imported torch already.
"""

import os
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)


def rank_main(rank: int, ranks: int, times: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, TIMEOUT)
    for turn in range(times + 1):
        store.add(f"here{turn}", 1)
        while store.add(f"here{turn}", 0) < ranks:
            time.sleep(0.001)
        begin = time.perf_counter()
        group = dist.PrefixStore(f"turn{turn}", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=ranks, timeout=TIMEOUT)
        dist.barrier()
        took = time.perf_counter() - begin
        if rank == 0 and turn:  # the first warms up
            print(took * 1000, flush=True)
        dist.destroy_process_group()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < ranks:
        time.sleep(0.001)


def main() -> None:
    ranks, times = int(sys.argv[1]), int(sys.argv[2])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            rank_main(rank, ranks, times, port)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
