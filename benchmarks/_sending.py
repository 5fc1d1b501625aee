"""Print the milliseconds that gloo takes to send bytes to another process, for several turns.

Arguments: bytes, turns. The bytes are one tensor. The receiver uses new memory, as a replaced rank
does.
"""

import sys
import time

import torch
import torch.distributed as dist
from _gloo import fork_ranks, form


def main(rank: int, store: dist.TCPStore) -> None:
    size, times = int(sys.argv[1]), int(sys.argv[2])
    form(store, "pair", rank, 2)
    source = torch.ones(0 if rank else size, dtype=torch.uint8)
    for turn in range(times + 1):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            dist.send(source, 1)
        else:
            dist.recv(torch.empty(size, dtype=torch.uint8), 0)
        if rank and turn:  # the first turn is the warm-up
            print((time.perf_counter() - begin) * 1000, flush=True)


if __name__ == "__main__":
    fork_ranks(2, main)
