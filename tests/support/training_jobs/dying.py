"""A run whose last rank dies again and again, while its peers wait for it in a collective.

Each process of the last rank finishes one step, and kills itself in its second one, at a place that
follows from the number of the step. All other ranks record what they hold at the start of each
step: bytes in memory, threads, and descriptors.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from rekindle.training.torch import Session

PLACES = ("forward", "backward", "collective", "logging", "large")
WIDTH = 128
_LARGE = 1 << 21  # elements; more bytes than the buffers of a connection
_PAGE = os.sysconf("SC_PAGE_SIZE")


def held() -> dict[str, int]:
    """Return the memory, threads and descriptors of this process."""
    return {
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE,
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


class Victim:
    """The fault of one process; it does nothing on the ranks that survive."""

    def __init__(self, *, dies: bool) -> None:
        self.dies = dies
        self.steps = 0  # that this process has begun
        self.place = ""

    def begin(self, step: int) -> None:
        self.steps += 1
        self.place = PLACES[step % len(PLACES)] if self.dies and self.steps > 1 else ""

    def at(self, place: str) -> None:
        if self.place == place:
            os.kill(os.getpid(), signal.SIGKILL)


class Network(nn.Module):
    """Four layers, with a place in the middle of the backward pass."""

    def __init__(self, victim: Victim) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self._victim = victim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._victim.at("backward"))
        return self.last(hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    torch.manual_seed(1)
    last = int(os.environ["WORLD_SIZE"]) - 1
    victim = Victim(dies=int(os.environ["RANK"]) == last)
    network = Network(victim)
    optimizer = torch.optim.AdamW(network.parameters())
    ddp = {"bucket_cap_mb": 0.05} if options.variant == "ddp" else False
    with Session(model=network, optimizer=optimizer, ddp=ddp, ignore=[victim]) as session:
        for step in session.steps(options.steps):
            with step:
                victim.begin(step.number)
                step.log(pid=os.getpid(), **held())
                victim.at("forward")
                optimizer.zero_grad()
                session.model(torch.ones(2, WIDTH)).sum().backward()
                sums = torch.ones(WIDTH)
                work = dist.all_reduce(sums, async_op=True)
                victim.at("collective")
                work.wait()
                victim.at("logging")
                dist.all_reduce(sums)
                if step.number % len(PLACES) == PLACES.index("large"):
                    begin_large(victim)
                optimizer.step()
    sys.stderr.write("the run has ended\n")


def begin_large(victim: Victim) -> None:
    """All-reduce a tensor; the victim dies when a part of it has arrived."""
    large = torch.ones(_LARGE)
    work = dist.all_reduce(large, async_op=True)
    while victim.place == "large" and large[0] == 1 and large[-1] == 1:
        pass
    victim.at("large")
    work.wait()


if __name__ == "__main__":
    main()
