"""The gate before each step: all ranks report whether they can do it, and all or none do it.

MindSpore cannot interrupt collectives on CPU. If one rank does not join a collective, its data and
the processes in it become unusable. So no rank enters the collectives of a step before it knows
that all ranks will. The ranks agree without a server. In round k each rank sends its knowledge to
the rank 2^k places after it, and receives that of the rank 2^k places before it. After as many
rounds as the world size has bits, each rank knows the answer of all ranks (a dissemination
barrier).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from rekindle.console import say
from rekindle.errors import SessionError, StaleError, UnexpectedError
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank.progress import HeldState, ProgressReporter
from rekindle.recovery.faults.fault import FaultKind

Address = tuple[str, int]

_HELLO = struct.Struct("<8sqqq")  # magic, generation, place in the world, purpose of the connection
HELLO_BYTES = _HELLO.size
_MAGIC = b"rekindle"
_WORD = struct.Struct("<qqqQ")  # step, flags, and the RunIdentity
_CAN, _ENDS = 1, 2  # all known ranks can do it; this rank has ended before it
_SIZE = struct.Struct("<q")  # the size of a message between ranks
_HELLO_S = 5.0
_AGAIN_S = 0.1  # after a failed accept
_NEVER = 1 << 62
STATE = 0  # purpose of a connection: a state; otherwise the distance of the two ranks in the gate
LOST = (OSError, StaleError)  # another rank has ended, or the generation


class PeerGoneError(ConnectionError):
    """The connection to another rank is cut, most likely because it has ended."""


class RunIdentity(NamedTuple):
    """The values that must be equal on all ranks.

    total: the number of steps. begins: a number that identifies the initial parameters.
    """

    total: int
    begins: int


_ANY = RunIdentity(0, 0)


class Listener:
    """Accepts the connections of other ranks, from the start of this rank to its end.

    If the process cannot take a connection, the caller waits in the kernel's queue.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._came = threading.Condition()
        self._connections: dict[tuple[int, int, int], socket.socket] = {}
        self._oldest = 0
        self._closed = threading.Event()
        self._failure: BaseException | None = None  # the error that ended the thread
        threading.Thread(target=self._run, name="rekindle-listener", daemon=True).start()

    def take(
        self, generation: int, place: int, purpose: int, is_over: Callable[[], bool]
    ) -> socket.socket:
        """Wait for the connection of the rank in this place, and return it.

        Raises StaleError: `is_over` became true. Raises UnexpectedError: the listener has failed.
        """
        with self._came:
            key = generation, place, purpose
            self._came.wait_for(
                lambda: key in self._connections or self._failure is not None or is_over()
            )
            if key not in self._connections:
                if self._failure is not None:
                    text = f"this rank accepts no connections: {self._failure!r}"
                    raise UnexpectedError(text) from self._failure
                raise StaleError(f"generation {generation} ended before all ranks had formed it")
            return self._connections.pop(key)

    def wake(self) -> None:
        """Wake the waiting threads, so that they call `is_over`."""
        with self._came:
            self._came.notify_all()

    def forget_before(self, generation: int) -> None:
        """Close unused connections of earlier generations."""
        with self._came:
            self._oldest = generation
            for key in [key for key in self._connections if key[0] < generation]:
                self._connections.pop(key).close()

    def close(self) -> None:
        """Close the listener and all unused connections."""
        self._closed.set()
        _shut(self._socket)  # this wakes the thread; a close would not
        self._socket.close()
        self.forget_before(_NEVER)

    def _run(self) -> None:
        try:
            self._accept()
        except BaseException as error:
            with self._came:
                self._failure = error
                self._came.notify_all()
            raise

    def _accept(self) -> None:
        reported = False
        while not self._closed.is_set():
            try:
                self._accept_one()
                reported = False
            except (OSError, RuntimeError) as error:  # too many open files, or too many threads
                if not self._closed.is_set() and not reported:
                    reported = True
                    say(f"the rank cannot accept a connection, and tries again: {error}")
                self._closed.wait(_AGAIN_S)

    def _accept_one(self) -> None:
        connection, _ = self._socket.accept()
        try:
            greets = threading.Thread(
                target=self._greet, args=(connection,), name="rekindle-greeting", daemon=True
            )
            greets.start()
        except BaseException:
            connection.close()
            raise

    def _greet(self, connection: socket.socket) -> None:
        """Read who connects; close the connection if the caller is not a rank of this job."""
        connection.settimeout(_HELLO_S)
        try:
            magic, generation, place, purpose = _HELLO.unpack(receive(connection, HELLO_BYTES))
        except OSError:
            connection.close()
            return
        connection.settimeout(None)
        with self._came:
            if magic != _MAGIC or generation < self._oldest:
                connection.close()
                return
            self._connections[generation, place, purpose] = connection
            self._came.notify_all()


class StepVote:
    """The gate of one generation. The main thread passes it; any thread may sever it.

    page: the heartbeat page, which shows the agent that this rank waits for others.
    """

    def __init__(self, listener: Listener, page: HeartbeatPage) -> None:
        self._listener = listener
        self._page = page
        self._lock = threading.Lock()
        self._severed = False
        self._outgoing: list[socket.socket] = []
        self._incoming: list[socket.socket] = []
        self._connections: list[socket.socket] = []

    def form(self, generation: int, place: int, addresses: Sequence[Address]) -> None:
        """Connect to the next ranks of the barrier, and wait until the former ones connect.

        addresses: where the ranks listen, by their place in the world.
        Raises StaleError: a thread severed the gate; PeerGoneError: a rank cannot be reached.
        """
        self._page.form()
        size, self._generation, self._place = len(addresses), generation, place
        self._listener.forget_before(generation)
        distances = [1 << bit for bit in range((size - 1).bit_length())]
        for distance in distances:
            self._outgoing.append(self.connect(addresses[(place + distance) % size], distance))
        for distance in distances:
            self._incoming.append(self.accept((place - distance) % size, distance))

    def connect(self, address: Address, purpose: int) -> socket.socket:
        """Connect to a rank.

        Raises PeerGoneError: it cannot be reached; StaleError: a thread severed the gate.
        """
        return self._keep(call(address, self._generation, self._place, purpose))

    def accept(self, place: int, purpose: int) -> socket.socket:
        """Wait for a rank to connect. Raises StaleError: a thread severed the gate."""
        is_over = lambda: self._severed  # noqa: E731
        return self._keep(self._listener.take(self._generation, place, purpose, is_over))

    def agree(self, step: int, *, can: bool, ends: bool = False, run: RunIdentity = _ANY) -> bool:
        """Report whether this rank can do a step; return whether all can, the same on all ranks.

        ends: this rank has ended its training before that step.
        Raises PeerGoneError: a rank has ended. Raises StaleError: a thread severed the gate.
        Raises SessionError: another rank is at another step, or at its end, or in another run.
        """
        if not self._outgoing:
            return can
        self._page.begin_operation(step + 1)
        self._page.wait(True)
        try:
            for outgoing, incoming in zip(self._outgoing, self._incoming, strict=True):
                outgoing.sendall(_WORD.pack(step, _CAN * can | _ENDS * ends, *run))
                other, flags, *theirs = _WORD.unpack(receive(incoming, _WORD.size))
                _compare((step, ends, run), (other, bool(flags & _ENDS), RunIdentity(*theirs)))
                can = can and bool(flags & _CAN)
        except OSError as error:
            raise self._lost(error) from error
        self._page.wait(False)
        return can

    def gather(self, data: bytes) -> list[bytes]:
        """Send data to all ranks, and return the data of all ranks in their order, without b"".

        Only for small data of few ranks, because all ranks send before they receive.
        Raises PeerGoneError: a rank has ended; StaleError: a thread severed the gate.
        """
        by_place = {self._place: data} if data else {}
        try:
            for outgoing, incoming in zip(self._outgoing, self._incoming, strict=True):
                encoded = msgspec.msgpack.encode(by_place)
                outgoing.sendall(_SIZE.pack(len(encoded)) + encoded)
                (size,) = _SIZE.unpack(receive(incoming, _SIZE.size))
                by_place |= msgspec.msgpack.decode(receive(incoming, size), type=dict[int, bytes])
        except OSError as error:
            raise self._lost(error) from error
        return [by_place[place] for place in sorted(by_place)]

    @property
    def severed(self) -> bool:
        """Whether the gate is severed; then no rank can pass it."""
        return self._severed

    def sever(self) -> None:
        """End all waits at this gate, now and later; the other ranks notice it."""
        with self._lock:
            self._severed = True
            for connection in self._connections:
                _shut(connection)
        self._listener.wake()

    def leave(self) -> None:
        """Sever the gate and close all connections."""
        self.sever()
        for connection in self._connections:
            connection.close()
        self._page.wait(False)

    def _lost(self, error: Exception) -> Exception:
        if self._severed:
            return StaleError("the generation ended while its ranks agreed on a step")
        return PeerGoneError(f"the connection to another rank failed: {error}")

    def _keep(self, connection: socket.socket) -> socket.socket:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._severed:
                connection.close()
                raise StaleError("the generation ended before all ranks had formed it")
            self._connections.append(connection)
        return connection


class VotingGenerations:
    """The common part of the adapters of frameworks whose ranks vote before each step.

    formed: whether this generation is formed. gate: the gate of this generation.
    """

    def __init__(self, state: HeldState, progress: ProgressReporter) -> None:
        self.listener = Listener()
        self.gate = StepVote(self.listener, progress.page)
        self.formed = False
        self._state, self._progress = state, progress

    def failed(self, error: BaseException) -> FaultKind | None:
        """Return LINK if another rank is lost, and None otherwise."""
        return FaultKind.LINK if isinstance(error, LOST) else None

    def close(self) -> None:
        """Leave the gate, and accept no more connections."""
        self.gate.leave()
        self.listener.close()

    def _new_gate(self) -> StepVote:
        """Leave the former generation's gate, and return that of the next one."""
        self.gate.leave()
        self.formed = False
        self.gate = StepVote(self.listener, self._progress.page)
        return self.gate


def _compare(mine: tuple[int, bool, RunIdentity], theirs: tuple[int, bool, RunIdentity]) -> None:
    (step, ends, run), (other, other_ends, other_run) = mine, theirs
    if run.total != other_run.total:
        raise SessionError(
            f"this rank has {run.total} steps, but another rank has {other_run.total}; give all "
            "ranks the same number of batches and epochs"
        )
    if run.begins != other_run.begins:
        raise SessionError(
            "another rank started with other parameters; set the same seed on all ranks before "
            "they build the network"
        )
    if step != other:
        raise SessionError(
            f"this rank is at step {step}, but another rank is at step {other}; give all ranks "
            "the same number of batches"
        )
    if ends is not other_ends:
        who = "this rank, but not another rank," if ends else "another rank, but not this rank,"
        raise SessionError(
            f"{who} ended its training after step {step}; a callback that stops training must "
            "stop all ranks after the same step"
        )


def call(address: Address, generation: int, place: int, purpose: int) -> socket.socket:
    """Connect to a listener, and identify this rank. Raises PeerGoneError: it cannot be reached."""
    host, port = address
    try:
        connection = socket.create_connection(address, timeout=_HELLO_S)
    except OSError as error:
        raise PeerGoneError(f"no rank answers at {host}:{port}: {error}") from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_HELLO.pack(_MAGIC, generation, place, purpose))
        connection.settimeout(None)  # the end of the generation ends a wait for a peer
    except OSError as error:
        connection.close()
        raise PeerGoneError(f"the rank at {host}:{port} closed the connection: {error}") from error
    return connection


def receive(connection: socket.socket, size: int) -> bytearray:
    """Receive `size` bytes. Raises OSError: the connection fails or closes before."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if not count:
            raise PeerGoneError("it closed its connection")
        filled += count
    return data


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side has done it already
        connection.shutdown(socket.SHUT_RDWR)
