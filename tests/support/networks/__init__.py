"""Two machines with a network between them that can drop all packets.

Each machine is a network namespace. A third namespace forwards packets between them, as a router.
Without forwarding it drops them, and no end of a connection notices that. This needs root, and the
commands `unshare`, `nsenter` and `ip`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from waiting import wait_until

NEEDS_NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))),
    reason="network namespaces need root, and the commands unshare, nsenter and ip",
)
ADDRESSES = ("10.77.1.1", "10.77.2.1")
DEVICE = "rk"  # the network device of each machine
_GATES = ("10.77.1.2", "10.77.2.2")
_FORWARD = "/proc/sys/net/ipv4/ip_forward"


class Network:
    """Two machines. `inside(number)` is a command that runs another command on machine 0 or 1."""

    def __init__(self, machines: Sequence[int], router: int) -> None:
        self._machines, self._router = machines, router

    def inside(self, number: int) -> list[str]:
        """Return the beginning of a command that runs on this machine."""
        return _inside(self._machines[number])

    def forward(self, *, on: bool) -> None:
        """Forward packets between the machines, or drop all of them."""
        text = f"echo {int(on)} > {_FORWARD}"
        subprocess.run([*_inside(self._router), "sh", "-c", text], check=True)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Yield two machines with a network. The end of the block removes both."""
    with contextlib.ExitStack() as closing:
        router, *machines = (closing.enter_context(_namespace()) for _ in range(3))
        for number, (machine, address, gate) in enumerate(
            zip(machines, ADDRESSES, _GATES, strict=True)
        ):
            ends = ["ip", "link", "add", f"{DEVICE}{number}", "netns", str(router), "type", "veth"]
            subprocess.run([*ends, "peer", "name", DEVICE, "netns", str(machine)], check=True)
            _set_up(router, f"{DEVICE}{number}", gate)
            _set_up(machine, DEVICE, address)
            route = ["ip", "route", "add", "default", "via", gate]
            subprocess.run([*_inside(machine), *route], check=True)
        found = Network(machines, router)
        found.forward(on=True)
        yield found


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Yield the id of a process in a network namespace of its own."""
    own = Path("/proc/self/ns/net").readlink()
    process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        there = Path(f"/proc/{process.pid}/ns/net")
        wait_until(lambda: there.readlink() != own, "a network namespace")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _set_up(process: int, device: str, address: str) -> None:
    for words in (
        ["ip", "address", "add", f"{address}/24", "dev", device],
        ["ip", "link", "set", device, "up"],
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run([*_inside(process), *words], check=True)


def _inside(process: int) -> list[str]:
    return ["nsenter", "--target", str(process), "--net", "--"]
