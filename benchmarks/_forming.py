"""Prints the milliseconds that N gloo ranks take to form a group, some times over.

Arguments: ranks, times. The ranks are forked and have imported torch already.
"""

import sys

import torch.distributed as dist
from _gloo import fork_ranks, form


def main(rank: int, store: dist.TCPStore) -> None:
    ranks, times = int(sys.argv[1]), int(sys.argv[2])
    for turn in range(times + 1):
        took = form(store, f"turn{turn}", rank, ranks)
        if rank == 0 and turn:  # the first warms up
            print(took * 1000, flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(int(sys.argv[1]), main)
