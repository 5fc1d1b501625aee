"""Waits for gloo's operations that end with the generation, whatever becomes of the operation.

When a gloo connection breaks, an operation that is half on the wire is forgotten: its preamble has
been read and its bytes not, or its bytes are still queued to be written (Pair::signalException of
gloo looks into neither place). Whoever waits for it waits for the group's whole time-out; the
larger the tensors, the surer. So nobody waits for gloo itself: the end of a generation ends the
waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, Work  # torch.distributed's; typed here

from rekindle.errors import StaleError

# Operations that gloo does end when it is severed end within milliseconds, and until then may write
# to their tensors: those that it has forgotten are given up a while later.
_GRACE_S = 0.1

_Future: TypeAlias = "torch.futures.Future[Any]"

_native_wait = Work.wait


def _same(value: Any) -> Any:
    return value


class Waits:
    """The waits of one process group: entered by any thread, all ended by release()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[_Future] = set()
        self._released = False

    def follow(self, future: _Future, pick: Callable[[Any], Any] = _same) -> _Future:
        """A future that is done when `future` is, or fails when the waits are released.

        pick: its value, of that of `future` (a `then` would bury the exception's text).
        """
        ours: _Future = torch.futures.Future()
        with self._lock:
            if self._released:
                ours.set_exception(_over())
                return ours
            self._futures.add(ours)
        future.add_done_callback(lambda done: self._pass_on(done, ours, pick))
        return ours

    def wait(self, work: Work) -> bool:
        """Wait for `work`; raises StaleError when the waits are released, else what it raises."""
        try:
            future = work.get_future()
        except RuntimeError:  # a send or a receive has none
            future = _future_of(work)
            self.follow(future).wait()
            return True  # and never twice: each wait takes one completion
        self.follow(future).wait()
        return _native_wait(work)

    def release_soon(self) -> None:
        """Release what gloo does not end by itself; for any thread, does not block."""
        timer = threading.Timer(_GRACE_S, self.release)
        timer.daemon = True
        timer.start()

    def release(self) -> None:
        """End all waits, now and from now on."""
        with self._lock:
            self._released = True
            futures, self._futures = self._futures, set()
        for future in futures:
            future.set_exception(_over())

    def _pass_on(self, done: _Future, ours: _Future, pick: Callable[[Any], Any]) -> None:
        with self._lock:
            if ours not in self._futures:
                return  # released
            self._futures.discard(ours)
        try:
            value = pick(done.value())
        except Exception as error:
            ours.set_exception(error)
        else:
            ours.set_result(value)


def _future_of(work: Work) -> _Future:
    """A future for an operation that has none: a thread waits in its stead."""
    future: _Future = torch.futures.Future()

    def wait() -> None:
        try:
            _native_wait(work)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=wait, name="rekindle-wait", daemon=True).start()
    return future


def _only_tensor(value: Any) -> Any:
    """What a hook's future must hold, of what a collective's holds: a list of one."""
    return value[0] if isinstance(value, list) else value


def _over() -> StaleError:
    return StaleError("the generation ended while a collective was under way")


_current: Waits | None = None


def use(waits: Waits | None) -> None:
    """Have `waits` be those of the default group from now on; None: gloo's own."""
    global _current
    _current = waits
    Work.wait = _native_wait if waits is None else _wait  # type: ignore[assignment, method-assign]


def in_use() -> bool:
    """Whether the default group's waits can be ended: it is gloo's, of a generation."""
    return _current is not None


def _wait(work: Work, timeout: timedelta | None = None) -> bool:
    if timeout is not None:
        return _native_wait(work, timeout)
    return _native_wait(work) if _current is None else _current.wait(work)


Hook = Callable[[Any, GradBucket], _Future]


def reduce_bucket(chosen: list[tuple[Hook, Any]], bucket: GradBucket) -> _Future:
    """A communication hook for DDP: what DDP does without one, or the script's own hook.

    chosen: the script's hook and its state, if it has registered one.
    """
    if chosen:
        hook, state = chosen[-1]
        future = hook(state, bucket)
    else:
        buffer = bucket.buffer().mul_(1.0 / dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None  # None: this rank is not of the group
        future = work.get_future()
    following = _current or Waits()
    return following.follow(future, _only_tensor)
