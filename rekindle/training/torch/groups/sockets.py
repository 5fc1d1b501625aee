"""The TCP sockets that this process has opened since a moment ago, as duplicates to act on.

A duplicate stays valid when its owner closes the original and the number comes to mean another.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End the connection, or one direction of it, for whoever else holds it."""
    with contextlib.suppress(OSError):  # the peer was first
        sock.shutdown(how)


def socket_inodes() -> set[int]:
    """What is open now, to be passed as `before` later."""
    return {inode for _, inode in _list_sockets()}


def new_sockets(before: set[int]) -> Iterator[socket.socket]:
    """Duplicates of the TCP sockets that were not there `before`; the caller closes them."""
    for number, inode in _list_sockets():
        if inode in before:
            continue
        try:
            sock = _duplicate(number)
        except OSError:
            continue  # closed since it was listed, or no socket any more
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            yield sock
        else:
            sock.close()


def _list_sockets() -> list[tuple[int, int]]:
    """(fd, inode) of each socket of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # closed since it was listed
        if target.startswith("socket:["):
            found.append((int(entry.name), int(target[8:-1])))
    return found


def _duplicate(number: int) -> socket.socket:
    copy = os.dup(number)
    # With socket.setdefaulttimeout() in force, a new socket object would switch the description it
    # shares with the owner to non-blocking.
    blocking = os.get_blocking(copy)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    os.set_blocking(copy, blocking)
    return sock


def connected_to(port: int, before: set[int]) -> Iterator[socket.socket]:
    """As new_sockets(), only those connected to `port`."""
    for sock in new_sockets(before):
        with contextlib.suppress(OSError):  # not connected
            if sock.getpeername()[1] == port:
                yield sock
                continue
        sock.close()
