"""Print the milliseconds that N gloo ranks take to form a group, for several turns.

Arguments: ranks, turns. The ranks are forked and have already imported torch.
"""

import sys

import torch.distributed as dist
from _gloo import fork_ranks, form


def main(rank: int, store: dist.TCPStore) -> None:
    ranks, times = int(sys.argv[1]), int(sys.argv[2])
    for turn in range(times + 1):
        took = form(store, f"turn{turn}", rank, ranks)
        if rank == 0 and turn:  # the first turn is the warm-up
            print(took * 1000, flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(int(sys.argv[1]), main)
