"""One generation's default process group: formed, severed from another thread, left at once.

Gloo has no abort that wakes a collective (`pg.abort()` does nothing in torch 2.13). What wakes it
is the end of its connections, so a group remembers which sockets it opened and shuts exactly
these down.
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

# Groups that were left. ~ProcessGroupGloo joins its threads: 20 ms, and for ever where gloo has
# forgotten an operation (see gloo_waits.py); where a DDP reducer drops the last reference, with the
# GIL held, which was seen to deadlock. So a group stays here until the next one is left and nobody
# else holds it: a wrapper does until a later generation gets so far that it is made new.
_left: list[dist.ProcessGroup] = []  # with the others of their generations

_TIMEVAL = struct.Struct("@ll")
_PAIR_NUMBER = struct.Struct("@n")
_TICK_S = 0.02  # the kernel rounds a socket's time-out up to its tick
_POKE_TIMEOUT_S = 1.0
_BURIAL_S = 0.5
_REST_S, _CALM_LOOKS = 1.0, 3


class Group:
    """The default process group of one generation; the next generation takes a new object.

    The main thread forms and leaves it; any thread may sever it at any time.
    page: where it shows that this rank waits for others.
    """

    def __init__(self, page: HeartbeatPage | None = None) -> None:
        self._lock = threading.Lock()
        self._severed = False
        self._sockets: list[socket.socket] = []  # duplicates: an fd number may come to mean another
        self._forming: _Forming | None = None
        self._group: dist.ProcessGroup | None = None
        self._groups: list[dist.ProcessGroup] = []  # with those that the script has made
        self._waits = waits.InterruptibleWaits(page)
        self._hooks: tuple[Callable[..., object], Callable[..., object]] | None = None

    @property
    def severed(self) -> bool:
        """Whether the generation was declared over; its collectives fail from then on."""
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
        """Make the default process group of `generation`; returns when all ranks have joined.

        Raises StaleError when it is severed meanwhile, and torch's own RuntimeError when it fails
        by itself. After either, leave() is due as after a success. For an accelerator's backend
        pass `device_id`: its communicator is then formed here, not in the first collective.
        make_more makes other groups of the generation, which end with it.
        """
        if "nccl" in backend:
            # A failed collective aborts its communicator, not the process (torch's default).
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        timeout = timedelta(seconds=timeout_s)
        line = _line_to(store, timeout)
        over = f"generation {generation} ended while it was formed"
        hook = sys.excepthook
        with self._lock:
            if self._severed:
                raise StaleError(over)
            self._forming = _Forming(line, world_size if "gloo" in backend else 1, timeout_s)
        private.reset_group_count()
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore(f"gen{generation}", line.store),
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
            line.shut()  # a wait that was broken off may have left half an answer on it
            if not self._severed:
                raise
            raise StaleError(over) from error
        finally:
            self._end_forming()
        if self._severed:
            raise StaleError(over)

    def sever(self) -> None:
        """End what this group has under way, here and, by cascade, at its peers.

        For any thread, while the main thread sits in form() or in a collective. Does not block.
        """
        with self._lock:
            if self._severed:
                return
            self._severed = True
            for sock in self._sockets:
                # For reading alone: where gloo's writes fail as well, an operation was seen that
                # neither completes nor fails. Every rank severs its own.
                shut(sock, socket.SHUT_RD)
            if self._forming is not None:
                self._forming.interrupt()
            groups = self._groups or [self._group] if self._group else []
        self._waits.release_soon()
        for group in groups:
            _abort_accelerators(group)

    def leave(self) -> None:
        """Sever, and give up the default process group. For the main thread; does not block."""
        self.sever()
        waits.use(None)
        self._waits.hide()
        if self._group is not None:
            if dist.is_initialized():  # else the script destroyed it itself
                dist.destroy_process_group()
            _free_later(self._groups or [self._group])
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            # init_process_group wraps the hook each time; the prefixes would pile up.
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
    """This process's connection to the ranks' store; it is kept while the store stays the same."""
    return TCPStore(host, port, wait_for_workers=False)


class _Line:
    """A connection to the job's store over which groups are formed.

    Shutting it down ends the wait for a late peer without costing the process its store. It
    serves one generation after the other: torch resolves the peer's name at both ends whenever it
    connects to a store, and a name service that does not answer costs seconds.
    """

    def __init__(self, store: TCPStore, timeout: timedelta) -> None:
        before = socket_inodes()
        self.store = TCPStore(store.host, store.port, timeout=timeout, wait_for_workers=False)
        self._sockets = list(connected_to(store.port, before))
        self.usable = True

    def shut(self) -> None:
        self.usable = False
        for sock in self._sockets:
            shut(sock)
            sock.close()


_lines: dict[tuple[str, int], _Line] = {}


def _line_to(store: TCPStore, timeout: timedelta) -> _Line:
    address = (store.host, store.port)
    line = _lines.get(address)
    if line is None or not line.usable:
        line = _lines[address] = _Line(store, timeout)
    line.store.set_timeout(timeout)
    return line


class _Forming:
    """A gloo group that is being formed: what it has opened so far, and how to make it give up."""

    def __init__(self, line: _Line, world_size: int, timeout_s: float) -> None:
        self._line = line
        self._before = socket_inodes()
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._pokes: list[socket.socket] = []

    def interrupt(self) -> None:
        """Wake the main thread: from its wait in the store, or from gloo's for a connection.

        Shutting gloo's listener down aborts the process (its loop thread throws), so each awaited
        peer is played instead: gloo takes any connection that opens with the pair's number. What
        is formed that way is never used. Should gloo ever change this, form() lasts until its
        own time-out.
        """
        self._line.shut()
        for sock in new_sockets(self._before):
            with sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._poke(sock)
                elif self._is_pair(sock):
                    shut(sock)

    def finish(self, *, complete: bool) -> Iterator[socket.socket]:
        """The sockets between this rank and its peers; `complete`: it was formed."""
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
                "%d of %d gloo connections found: a fault will cost the collective's time-out"
                " (TORCH_GLOO_LAZY_INIT or a transport other than TCP?)",
                found,
                self._world_size - 1,
            )

    def _is_pair(self, sock: socket.socket) -> bool:
        # Another thread of the script may have opened a socket meanwhile. Gloo's are told by what
        # hardly any other has: the group's time-out as its own, and an address marked reusable.
        option = sock.getsockopt
        if option(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        if not option(socket.SOL_SOCKET, socket.SO_REUSEADDR):
            return False
        raw = option(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size)
        seconds, micros = _TIMEVAL.unpack(raw)
        # The script's own groups have torch's default, if it has not said another.
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
                return  # the listener went away: forming has ended


def _free_later(groups: list[dist.ProcessGroup]) -> None:
    """Keep these, and free off the main thread those before that nobody else holds."""
    earlier = [
        _left.pop(at) for at in reversed(range(len(_left))) if _references(_left, at) == _OURS
    ]
    _left.extend(groups)
    # A Python reference that is the last one frees the group without the GIL, so this thread
    # stalls nobody. Where the interpreter's end cuts the destructor short, the process aborts; but
    # where gloo has forgotten an operation, the destructor waits for it (see gloo_waits.py).
    burial = threading.Thread(target=earlier.clear, name="rekindle-bury", daemon=True)
    burial.start()
    atexit.register(burial.join, _BURIAL_S)


def _references(objects: list[Any], at: int) -> int:
    return sys.getrefcount(objects[at])


_OURS = _references([object()], 0)  # what the count is where the list has the only one


def _abort_accelerators(group: dist.ProcessGroup) -> None:
    """Abort what is not gloo (NCCL, HCCL, XCCL): those backends have an abort that wakes."""
    for backend in private.backends_of(group):
        if backend.name() != "gloo":
            backend.abort()


def leave_for_good() -> None:
    """Give up the default group of a script that was started by hand, and never free it.

    Its DDP wrapper would drop the last reference as the script ends, and join gloo's threads with
    the GIL held, for which they may wait (seen with torch 2.13). Under an agent see program.end().
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    dist.destroy_process_group()
    atexit.register(_let_gloo_rest)


def _let_gloo_rest() -> None:
    """Wait until gloo's threads have let go of their last operations.

    An operation holds a Python object (torch 2.13 stashes the context of each backward pass), and a
    thread that drops one while the interpreter ends aborts the process. Sleeping, this thread
    leaves them the GIL: one that still sleeps then has nothing to do.
    """
    calm = 0
    deadline = time.monotonic() + _REST_S
    while calm < _CALM_LOOKS and time.monotonic() < deadline:
        time.sleep(0.001)
        calm = calm + 1 if all(map(_sleeps, Path("/proc/self/task").iterdir())) else 0


def _sleeps(thread: Path) -> bool:
    """Whether a thread of gloo's waits for work; true of all other threads."""
    try:
        name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return True
    return name != "pt_gloo_runloop" or rest.split()[0] == "S"
