"""Two machines with a network between them that can drop all packets.

Each machine is a network namespace. A third namespace forwards packets between them, as a router.
Without forwarding it drops them, and no end of a connection notices that. `apart` also gives each
machine a name, processes and files of its own. This needs root, and the commands `unshare`,
`nsenter` and `ip`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from repository import ROOT
from waiting import wait_until

NEEDS_NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))),
    reason="network namespaces need root, and the commands unshare, nsenter and ip",
)
ADDRESSES = ("10.77.1.1", "10.77.2.1")
DEVICE = "rk"  # the network device of each machine
_GATES = ("10.77.1.2", "10.77.2.2")
_FORWARD = "/proc/sys/net/ipv4/ip_forward"


# The first process of a machine that shares no files with others. $1: the folder that is its /tmp;
# $2: its name; $3: its known names and addresses; $4: the repository, which may be below /tmp.
_APART = """
set -e
mount --make-rprivate /
case "$4/" in /tmp/*)
    mkdir -p "$1/${4#/tmp/}"
    mount --rbind "$4" "$1/${4#/tmp/}"
esac
mkdir -p "$1/etc"
printf '127.0.0.1 localhost\\n%s' "$3" > "$1/etc/hosts"
: > "$1/etc/resolv.conf"
mount --bind "$1/etc/hosts" /etc/hosts
mount --bind "$1/etc/resolv.conf" /etc/resolv.conf
mount --rbind "$1" /tmp
mount -t tmpfs none /dev/shm
hostname "$2"
echo ready
exec sleep infinity
"""


class Network:
    """Two machines. `inside(number)` is a command that runs another command on machine 0 or 1."""

    def __init__(self, machines: Sequence[int], router: int, *, apart: bool = False) -> None:
        self._machines, self._router, self._apart = machines, router, apart

    def inside(self, number: int) -> list[str]:
        """Return the beginning of a command that runs on this machine."""
        return _inside(self._machines[number], apart=self._apart)

    def forward(self, *, on: bool) -> None:
        """Forward packets between the machines, or drop all of them."""
        text = f"echo {int(on)} > {_FORWARD}"
        subprocess.run([*_inside(self._router), "sh", "-c", text], check=True)


@contextlib.contextmanager
def network(apart: Sequence[Path] = (), hosts: str = "") -> Iterator[Network]:
    """Yield two machines with a network. The end of the block removes both, and all processes.

    apart: for machines that share nothing, a folder that is the /tmp of each. hosts: lines of
    /etc/hosts of such machines, which know no other name, also not their own.
    """
    with contextlib.ExitStack() as closing:
        router = closing.enter_context(_namespace())
        machines = [
            closing.enter_context(_apart(apart[number], f"machine{number}", hosts))
            if apart
            else closing.enter_context(_namespace())
            for number in range(2)
        ]
        for number, (machine, address, gate) in enumerate(
            zip(machines, ADDRESSES, _GATES, strict=True)
        ):
            ends = ["ip", "link", "add", f"{DEVICE}{number}", "netns", str(router), "type", "veth"]
            subprocess.run([*ends, "peer", "name", DEVICE, "netns", str(machine)], check=True)
            _set_up(router, f"{DEVICE}{number}", gate)
            _set_up(machine, DEVICE, address)
            route = ["ip", "route", "add", "default", "via", gate]
            subprocess.run([*_inside(machine), *route], check=True)
        found = Network(machines, router, apart=bool(apart))
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


@contextlib.contextmanager
def _apart(folder: Path, name: str, hosts: str) -> Iterator[int]:
    """Yield the id of the first process of a machine; all others of the machine end with it."""
    kinds = ["--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child"]
    command = ["unshare", *kinds, "--mount-proc", "sh", "-c", _APART, "sh"]
    process = subprocess.Popen(
        [*command, str(folder), name, hosts, str(ROOT)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        [first] = psutil.Process(process.pid).children()
        yield first.pid
    finally:
        process.kill()
        process.communicate()


def _set_up(process: int, device: str, address: str) -> None:
    for words in (
        ["ip", "address", "add", f"{address}/24", "dev", device],
        ["ip", "link", "set", device, "up"],
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run([*_inside(process), *words], check=True)


def _inside(process: int, *, apart: bool = False) -> list[str]:
    kinds = ["--net", "--uts", "--mount", "--pid", "--ipc"] if apart else ["--net"]
    return ["nsenter", "--target", str(process), *kinds, "--"]
