"""Form one generation's default process group; sever it from another thread; leave it immediately.

Gloo has no abort that wakes a collective (`pg.abort()` does nothing in torch 2.13). A collective
wakes when its connections end. So a group remembers the sockets that it opened, and shuts down
exactly these.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed's; typed only here
from torch.distributed.constants import default_pg_timeout

from rekindle.errors import StaleError
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.training.torch import private
from rekindle.training.torch.groups import gloo_waits as waits
from rekindle.training.torch.groups.gloo_waits import connected_to, new_sockets, shut, socket_inodes

_log = logging.getLogger(__name__)

# Groups that were left. ~ProcessGroupGloo joins its threads, which takes 20 ms. It never ends if
# gloo has lost an operation (see gloo_waits.py). If a DDP reducer drops the last reference, the
# destructor holds the GIL, and a deadlock was observed. So a group stays here until the next group
# is left and no other object holds it. A wrapper holds its group until a later generation
# initialises the wrapper again.
_left: list[dist.ProcessGroup] = []  # with the other groups of their generations

_TIMEVAL = struct.Struct("@ll")
_PAIR_NUMBER = struct.Struct("@n")
_TICK_S = 0.02  # the kernel rounds a socket's time-out up to its tick
_POKE_TIMEOUT_S = 1.0
_FREEING_S = 0.5
_REST_S, _CALM_LOOKS = 1.0, 3
# Limit to connect to the ranks' store. A store may die while ranks connect to it, and nothing wakes
# a rank from torch's constructor, which tries twice. Then the next generation gets another store.
_CONNECT_TO_STORE = timedelta(seconds=30)


class Group:
    """The default process group of one generation; the next generation takes a new object.

    The main thread forms and leaves it; any thread may sever it at any time.
    page: shows the agent that this rank waits for others.
    """

    def __init__(self, page: HeartbeatPage | None = None) -> None:
        self._lock = threading.Lock()
        self._severed = False
        self._sockets: list[socket.socket] = []  # duplicates: an fd number may be reused
        self._forming: _Forming | None = None
        self._group: dist.ProcessGroup | None = None
        self._groups: list[dist.ProcessGroup] = []  # with the groups that the script has made
        self._waits = waits.InterruptibleWaits(page)
        self._hooks: tuple[Callable[..., object], Callable[..., object]] | None = None

    @property
    def severed(self) -> bool:
        """Whether the generation was declared over; its collectives then fail."""
        return self._severed

    def form(  # noqa: PLR0913  torch's own arguments, passed through
        self,
        *,
        store: TCPStore,
        generation: int,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
        device_id: torch.device | None = None,
        make_more: Callable[[], None] | None = None,
    ) -> None:
        """Make the default process group of `generation`; return when all ranks have joined.

        Raises StaleError: the group was severed during the forming; torch's RuntimeError: the
        forming failed. The caller must call leave() after an error too. For an accelerator's
        backend pass `device_id`: its communicator is then formed here, not in the first collective.
        make_more makes other groups of the generation, which end with it.
        """
        if "nccl" in backend:
            # A failed collective aborts its communicator, not the process (torch's default).
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
            # NCCL's watchdog does not end the process when a kernel has failed (torch's default).
            # The main thread raises the kernel's error, which shows the kind of fault.
            os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        timeout = timedelta(seconds=timeout_s)
        connection = _connection_to(store, timeout)
        over = f"generation {generation} ended before all ranks had formed it"
        hook = sys.excepthook
        with self._lock:
            if self._severed:
                raise StaleError(over)
            self._forming = _Forming(connection, world_size if "gloo" in backend else 1, timeout_s)
        private.reset_group_count()
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore(f"gen{generation}", connection.store),
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                device_id=device_id,
            )
            self._group = dist.group.WORLD
            if dist.get_backend() == "gloo":
                waits.use(self._waits)
            if make_more is not None:
                make_more()
            self._groups = private.all_groups()
            self._hooks = (hook, sys.excepthook)
        except RuntimeError as error:
            connection.shut()  # an interrupted wait may have left a partial answer on it
            if not self._severed:
                raise
            raise StaleError(over) from error
        finally:
            self._end_forming()
        if self._severed:
            raise StaleError(over)

    def sever(self) -> None:
        """End the operations of this group on this rank, and through it at its peers.

        Any thread may call it while the main thread is in form() or in a collective. It does not
        block.
        """
        with self._lock:
            if self._severed:
                return
            self._severed = True
            for sock in self._sockets:
                # Only for reading: if gloo's writes fail too, an operation may neither complete nor
                # fail (observed). Every rank severs its own sockets.
                shut(sock, socket.SHUT_RD)
            if self._forming is not None:
                self._forming.interrupt()
            groups = self._groups or [self._group] if self._group else []
        self._waits.release_soon()
        for group in groups:
            _abort_accelerators(group)

    def leave(self) -> None:
        """Sever and destroy the default process group. For the main thread; does not block."""
        self.sever()
        waits.use(None)
        self._waits.hide()
        if self._group is not None:
            if dist.is_initialized():  # otherwise the script has destroyed it
                dist.destroy_process_group()
            _free_later(self._groups or [self._group])
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            # Every init_process_group wraps the hook, and each wrapper adds a prefix to the output.
            sys.excepthook = self._hooks[0]
        for sock in self._sockets:
            shut(sock)
            sock.close()
        self._sockets = []
        self._group = self._hooks = None
        self._groups = []

    def _end_forming(self) -> None:
        with self._lock:
            forming, self._forming = self._forming, None
        if forming is not None:
            for sock in forming.finish(complete=self._group is not None):
                with self._lock:
                    self._sockets.append(sock)
                    if self._severed:
                        shut(sock, socket.SHUT_RD)


@functools.lru_cache(maxsize=1)
def store_at(host: str, port: int) -> TCPStore:
    """Return this process's connection to the ranks' store; reused while the store is the same."""
    return TCPStore(host, port, timeout=_CONNECT_TO_STORE, wait_for_workers=False)


class _StoreConnection:
    """A connection to the job's store over which groups are formed.

    Its shutdown ends the wait for a late peer, and the process keeps its other connection to the
    store. It serves all generations one after the other: torch resolves the peer's name at both
    ends for each new connection, and a name service that does not answer delays that by seconds.
    """

    def __init__(self, store: TCPStore) -> None:
        before = socket_inodes()
        self.store = TCPStore(
            store.host, store.port, timeout=_CONNECT_TO_STORE, wait_for_workers=False
        )
        self._sockets = list(connected_to(store.port, before))
        self.usable = True

    def shut(self) -> None:
        self.usable = False
        for sock in self._sockets:
            shut(sock)
            sock.close()


_store_connections: dict[tuple[str, int], _StoreConnection] = {}


def _connection_to(store: TCPStore, timeout: timedelta) -> _StoreConnection:
    address = (store.host, store.port)
    connection = _store_connections.get(address)
    if connection is None or not connection.usable:
        connection = _store_connections[address] = _StoreConnection(store)
    connection.store.set_timeout(timeout)
    return connection


class _Forming:
    """A gloo group during its forming: the sockets that it has opened, and how to interrupt it."""

    def __init__(self, connection: _StoreConnection, world_size: int, timeout_s: float) -> None:
        self._connection = connection
        self._before = socket_inodes()
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._pokes: list[socket.socket] = []

    def interrupt(self) -> None:
        """Wake the main thread from its wait in the store, or from gloo's wait for a connection.

        A shutdown of gloo's listener would abort the process, because its loop thread throws. So
        this method connects instead of each awaited peer: gloo accepts any connection that opens
        with the pair's number. The group that is formed in this way is never used. If gloo ever
        changes this, form() waits until its own time-out.
        """
        self._connection.shut()
        for sock in new_sockets(self._before):
            with sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._poke(sock)
                elif self._is_pair(sock):
                    shut(sock)

    def finish(self, *, complete: bool) -> Iterator[socket.socket]:
        """Yield the sockets between this rank and its peers; `complete`: the group was formed."""
        for poke in self._pokes:
            poke.close()
        found = 0
        for sock in new_sockets(self._before):
            if self._is_pair(sock):
                found += 1
                yield sock
            else:
                sock.close()
        if complete and found < self._world_size - 1:
            _log.warning(
                "Rekindle found only %d of %d gloo connections, so after a fault ranks wait for "
                "the timeout of the collective (is TORCH_GLOO_LAZY_INIT set, or the transport "
                "not TCP?)",
                found,
                self._world_size - 1,
            )

    def _is_pair(self, sock: socket.socket) -> bool:
        # Another thread of the script may have opened a socket at the same time. Gloo's sockets
        # have the group's time-out and a reusable address, and hardly any other socket has both.
        option = sock.getsockopt
        if option(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        if not option(socket.SOL_SOCKET, socket.SO_REUSEADDR):
            return False
        raw = option(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size)
        seconds, micros = _TIMEVAL.unpack(raw)
        # The script's own groups have torch's default time-out if the script does not set another.
        known = (self._timeout_s, default_pg_timeout.total_seconds())
        return any(abs(seconds + micros / 1e6 - each) < _TICK_S for each in known)

    def _poke(self, listener: socket.socket) -> None:
        for number in range(self._world_size):
            poke = socket.socket(listener.family)
            self._pokes.append(poke)
            poke.settimeout(_POKE_TIMEOUT_S)
            try:
                poke.connect(listener.getsockname())
                poke.send(_PAIR_NUMBER.pack(number))
            except OSError:
                return  # the listener was closed: the forming has ended


def _free_later(groups: list[dist.ProcessGroup]) -> None:
    """Keep these groups; free earlier groups without other references on another thread."""
    earlier = [
        _left.pop(at) for at in reversed(range(len(_left))) if _references(_left, at) == _OURS
    ]
    _left.extend(groups)
    # The last Python reference frees the group without the GIL, so this thread blocks no other
    # thread. If the interpreter's end interrupts the destructor, the process aborts. But if gloo
    # has lost an operation, the destructor waits for it without end (see gloo_waits.py). So the
    # exit waits briefly.
    freeing = threading.Thread(target=earlier.clear, name="rekindle-free-groups", daemon=True)
    freeing.start()
    atexit.register(freeing.join, _FREEING_S)


def _references(objects: list[Any], at: int) -> int:
    return sys.getrefcount(objects[at])


_OURS = _references([object()], 0)  # the count of an object that only the list refers to


def _abort_accelerators(group: dist.ProcessGroup) -> None:
    """Abort backends other than gloo (NCCL, HCCL, XCCL): their abort wakes a collective."""
    for backend in private.backends_of(group):
        if backend.name() != "gloo":
            backend.abort()


def leave_for_good() -> None:
    """Destroy the default group of a script without an agent, and never free the group.

    Its DDP wrapper would drop the last reference as the script ends. It would then join gloo's
    threads with the GIL held, for which they may wait (seen with torch 2.13). For a rank with an
    agent see program.end().
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    dist.destroy_process_group()
    atexit.register(_let_gloo_rest)


def _let_gloo_rest() -> None:
    """Wait until gloo's threads have released their last operations.

    An operation holds a Python object, because torch 2.13 keeps the context of each backward pass.
    A thread that drops such an object while the interpreter ends aborts the process. While this
    thread sleeps, gloo's threads can take the GIL. A thread that still sleeps then has nothing to
    do.
    """
    calm = 0
    deadline = time.monotonic() + _REST_S
    while calm < _CALM_LOOKS and time.monotonic() < deadline:
        time.sleep(0.001)
        calm = calm + 1 if all(map(_sleeps, Path("/proc/self/task").iterdir())) else 0


def _sleeps(thread: Path) -> bool:
    """Return whether one of gloo's threads waits for work; True for other threads."""
    try:
        name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # the thread has ended
        return True
    return name != "pt_gloo_runloop" or rest.split()[0] == "S"
