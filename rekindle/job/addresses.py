"""Find the IPv4 addresses of this machine, and their network interfaces."""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import ipaddress
import socket
import struct
import threading

from rekindle import names

ALL = "0.0.0.0"  # to listen at all addresses
RESOLVE_S = 10.0  # limit for the name service
_ELSEWHERE = "192.0.2.1"  # of no machine (RFC 5737); a route towards it is the default route
_SIOCGIFCONF = 0x8912  # linux/sockios.h
_INTERFACE = struct.Struct("16s 4x 4s 16x")  # struct ifreq (netdevice(7)): its name and address
_MOST = 1024  # addresses of one machine


def interfaces() -> dict[str, str]:
    """Return the network interface of each IPv4 address of this machine, second ones included."""
    found = array.array("B", bytes(_MOST * _INTERFACE.size))
    where, length = found.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, struct.pack("iL", length, where))
    used, _ = struct.unpack("iL", answer)
    return {
        socket.inet_ntoa(address): name.partition(b"\0")[0].decode().partition(":")[0]
        for name, address in _INTERFACE.iter_unpack(found.tobytes()[:used])
    }


def resolve(host: str) -> list[str]:
    """Return the IPv4 addresses of a name; an empty list if no name service knows it (yet).

    A name service that does not answer within RESOLVE_S knows no name.
    """
    found: list[str] = []

    look_up = functools.partial(socket.getaddrinfo, host, None, socket.AF_INET, socket.SOCK_STREAM)

    def ask() -> None:
        with contextlib.suppress(OSError):
            found.extend(str(address[0]) for *_, address in look_up())

    asking = threading.Thread(target=ask, daemon=True, name=f"{names.OUR_THREADS}names")
    asking.start()
    asking.join(RESOLVE_S)
    return found.copy()


def is_loopback(host: str) -> bool:
    """Return whether the text itself names the loopback interface, on each machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_for_others(host: str) -> str:
    """Return the address of this machine for processes that reach each other through `host`.

    It is `host` itself if that is an own address, otherwise the address on the route to `host`.
    /etc/hosts often gives a machine's own name a loopback address, which others cannot use. Then it
    is the address on the default route, or any other one. A machine without a network has only the
    loopback address.
    """
    own = interfaces()
    if host in own:
        return host
    towards = resolve(host)
    address = _source(towards[0]) if towards else None
    if address is not None and (is_loopback(host) or not is_loopback(address)):
        return address
    known = (_source(_ELSEWHERE), *own)
    return next((each for each in known if each and not is_loopback(each)), names.LOOPBACK)


def _source(destination: str) -> str | None:
    """Return the own address that the kernel uses towards an address. This sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
