"""End gloo's waits with the generation: its operations, and the sockets below them.

When a gloo connection breaks, gloo loses an operation that is only partly sent. Either gloo has
read the operation's preamble and not its bytes, or its bytes are still queued
(Pair::signalException of gloo checks neither case). A thread that waits for such an operation waits
for the group's complete time-out. This occurs more often with larger tensors. So no thread waits
for gloo directly: the end of a generation ends the waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, Work  # torch.distributed's; typed here

from rekindle.errors import StaleError
from rekindle.profiling.markers import Operation
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.training.torch import private

# After a sever, an operation that gloo does end ends within milliseconds, and may write to its
# tensors until then. The operations that gloo has lost are released after this time.
_GRACE_S = 0.1

_Future: TypeAlias = "torch.futures.Future[Any]"
_native_wait = Work.wait
_current: InterruptibleWaits | None = None
_record: Callable[[Operation], Callable[[], None]] | None = None
_TENSORS = ("tensor", "input_tensor", "input", "output_tensor", "output")
Hook = Callable[[Any, GradBucket], _Future]


def shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End the connection, or one direction of it, for all holders of its socket."""
    with contextlib.suppress(OSError):  # the peer has ended it first
        sock.shutdown(how)


def socket_inodes() -> set[int]:
    """Return the sockets that are open now; the caller passes them as `before` later."""
    return {inode for _, inode in _list_sockets()}


def new_sockets(before: set[int]) -> Iterator[socket.socket]:
    """Yield duplicates of the TCP sockets that did not exist `before`; the caller closes them."""
    for number, inode in _list_sockets():
        if inode in before:
            continue
        try:
            sock = _duplicate(number)
        except OSError:
            continue  # closed since it was listed, or not a socket now
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            yield sock
        else:
            sock.close()


def _list_sockets() -> list[tuple[int, int]]:
    """Return (fd, inode) of each socket of this process."""
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
    # After socket.setdefaulttimeout(), a new socket object would make the description non-blocking,
    # also for the socket's owner.
    blocking = os.get_blocking(copy)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    os.set_blocking(copy, blocking)
    return sock


def connected_to(port: int, before: set[int]) -> Iterator[socket.socket]:
    """Yield the sockets of new_sockets() that are connected to `port`."""
    for sock in new_sockets(before):
        with contextlib.suppress(OSError):  # not connected
            if sock.getpeername()[1] == port:
                yield sock
                continue
        sock.close()


def _same(value: Any) -> Any:
    return value


class InterruptibleWaits:
    """The waits of one process group: any thread may enter one, and release() ends all.

    page: shows the agent whether this rank waits for others, and which collectives it has begun.
    """

    def __init__(self, page: HeartbeatPage | None = None) -> None:
        self._page = page or HeartbeatPage()
        self._page.form()
        self._lock = threading.Lock()
        self._futures: set[_Future] = set()
        self._released = False

    def follow(
        self,
        future: _Future,
        pick: Callable[[Any], Any] = _same,
        mark: int | None = None,
        operation: Operation | None = None,
    ) -> _Future:
        """Return a future that is done when `future` is done, or fails when the waits are released.

        pick: computes its value from the value of `future`. (A `then` would hide the exception's
        text.)
        mark: identifies the collective; None: not all ranks take part in it.
        operation: the description for the record; None: it is not recorded.
        """
        ours: _Future = torch.futures.Future()
        with self._lock:
            if self._released:
                ours.set_exception(_over())
                return ours
            if mark is not None:
                self._page.begin_operation(mark)
            if not self._futures:
                self._page.wait(True)
            self._futures.add(ours)
        if operation is not None and _record is not None:
            pick = _reporting(_record(operation), pick)
        future.add_done_callback(lambda done: self._pass_on(done, ours, pick))
        return ours

    def wait(self, work: Work, mark: int | None = None, operation: Operation | None = None) -> bool:
        """Wait for `work`. Raises StaleError: the waits are released; and the errors of `work`.

        mark, operation: as in `follow`.
        """
        try:
            future = work.get_future()
        except RuntimeError:  # a send or a receive has none
            future = _future_of(work)
            self.follow(future, operation=operation).wait()
            return True  # without a second wait: each wait takes one completion
        self.follow(future, mark=mark, operation=operation).wait()
        return _native_wait(work)

    def hide(self) -> None:
        """Stop showing waits: the page now belongs to the next group."""
        with self._lock:
            self._page.wait(False)
            self._page = HeartbeatPage()

    def release_soon(self) -> None:
        """Release the waits that gloo does not end. For any thread; does not block."""
        timer = threading.Timer(_GRACE_S, self.release)
        timer.daemon = True
        timer.start()

    def release(self) -> None:
        """End all current and later waits."""
        with self._lock:
            self._released = True
            futures, self._futures = self._futures, set()
            self._show_end()
        for future in futures:
            future.set_exception(_over())

    def _pass_on(self, done: _Future, ours: _Future, pick: Callable[[Any], Any]) -> None:
        with self._lock:
            if ours not in self._futures:
                return  # released
            self._futures.discard(ours)
            self._show_end()
        try:
            value = pick(done.value())
        except Exception as error:
            _fail(ours, error)
        else:
            ours.set_result(value)

    def _show_end(self) -> None:
        if not self._futures:
            self._page.wait(False)


def _reporting(done: Callable[[], None], pick: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls `done` and then `pick`; it is not called for a failure."""

    def report(value: Any) -> Any:
        done()
        return pick(value)

    return report


def _future_of(work: Work) -> _Future:
    """Return a future for an operation that has none: a thread waits for the operation."""
    future: _Future = torch.futures.Future()

    def wait() -> None:
        try:
            _native_wait(work)
        except Exception as error:
            _fail(future, error)
        else:
            future.set_result(None)

    threading.Thread(target=wait, name="rekindle-wait", daemon=True).start()
    return future


def _fail(future: _Future, error: Exception) -> None:
    """Let the future raise this error, without its traceback.

    The traceback holds the frame that holds the future, and the garbage collector does not see that
    a future holds its error (torch 2.13). So all three, with the tensors of the operation, would
    stay for ever.
    """
    future.set_exception(error.with_traceback(None))


def _only_tensor(value: Any) -> Any:
    """Return a hook's value from a collective's value, which is a list of one tensor."""
    return value[0] if isinstance(value, list) else value


def _over() -> StaleError:
    return StaleError("the generation ended during a collective")


def record(joined: Callable[[Operation], Callable[[], None]] | None) -> None:
    """Call `joined` when a rank waits for a collective, and its result when that is done.

    Any thread may call both. None: nothing is recorded.
    """
    global _record
    _record = joined


def use(waits: InterruptibleWaits | None) -> None:
    """Set the waits of the default group; None: gloo's own waits."""
    global _current
    _current = waits
    Work.wait = _native_wait if waits is None else _wait  # type: ignore[assignment, method-assign]


def in_use() -> bool:
    """Return whether the default group's waits can end early: it is a generation's gloo group."""
    return _current is not None


def _wait(work: Work, timeout: timedelta | None = None) -> bool:
    if timeout is not None:
        return _native_wait(work, timeout)
    if _current is None:
        return _native_wait(work)
    caller = sys._getframe(1)  # in torch, a function with the collective's name
    place = f"{caller.f_code.co_name}:{caller.f_lineno}"
    operation = _operation(caller) if _record is not None else None
    return _current.wait(work, _mark(place) if _is_everybodys(caller) else None, operation)


def _is_everybodys(caller: FrameType) -> bool:
    """Return whether all ranks take part in the collective that the caller waits for.

    A script that calls wait() on a work handle does not show the handle's group. Then the answer
    depends on whether there is only one group.
    """
    if caller.f_code.co_filename != dist.distributed_c10d.__file__:
        return len(private.all_groups()) == 1
    return caller.f_locals.get("group") in (None, dist.group.WORLD)


def _operation(caller: FrameType) -> Operation:
    """Return the caller's operation: one of torch's collectives, or a wait for an earlier one."""
    if caller.f_code.co_filename != dist.distributed_c10d.__file__:
        return Operation("0", "0", "", "wait", "")
    here = caller.f_locals
    tensor = next(
        (here[name] for name in _TENSORS if isinstance(here.get(name), torch.Tensor)), None
    )
    return _described(caller.f_code.co_name, tensor, here.get("group"))


def _described(name: str, tensor: torch.Tensor | None, group: Any) -> Operation:
    return Operation(
        stream_id="0",
        count=str(tensor.numel() if tensor is not None else 0),
        data_type=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
        op_name=name,
        group_name=(
            "default_group" if group in (None, dist.group.WORLD) else str(group.group_name)
        ),
    )


def _mark(place: str) -> int:
    """Return a number for a place in the code that is the same on all ranks."""
    return zlib.crc32(place.encode())


def reduce_bucket(chosen: list[tuple[Hook, Any]], bucket: GradBucket) -> _Future:
    """Reduce a bucket as DDP's communication hook: in DDP's default way, or by the script's hook.

    chosen: the script's hook and its state, if the script has registered one.
    """
    if chosen:
        hook, state = chosen[-1]
        future = hook(state, bucket)
    else:
        buffer = bucket.buffer().mul_(1.0 / dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None  # None: this rank is not in the group
        future = work.get_future()
    following = _current or InterruptibleWaits()
    operation = None
    if _record is not None:
        operation = _described("all_reduce", bucket.buffer(), None)
    mark = _mark(f"bucket {bucket.index()}")
    return following.follow(future, _pick_for(bucket.buffer().device), mark, operation)


def _pick_for(device: torch.device) -> Callable[[Any], Any]:
    """Return the function that computes a hook's value; gloo's thread calls it.

    Gloo copies its result to a GPU in a stream of its own. Its thread makes only the default stream
    wait for that copy (torch 2.11). So the stream of the backward pass waits for the default one.
    """
    if device.type != "cuda":
        return _only_tensor
    stream = torch.cuda.current_stream(device)

    def pick(value: Any) -> Any:
        stream.wait_stream(torch.cuda.default_stream(device))
        return _only_tensor(value)

    return pick
