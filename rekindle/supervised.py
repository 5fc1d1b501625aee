"""Run the tasks of one process so that an unexpected error of one of them ends the process.

A process that loses a task, a callback or a thread works only in part, and no other process notices
that. So it ends with a text that names the part that failed, and the job recovers from its end as
from any other. If the process of a flow loses a thread, it continues to steer its job, and writes a
report that `rekindle status` shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rekindle import names
from rekindle.errors import UnexpectedError

_AGAIN_S = 1.0  # asyncio may lose a cancellation, so a failed block gets it again after this time

T = TypeVar("T")


@contextlib.asynccontextmanager
async def supervised(**works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run each work, by its name, as a task until the block ends.

    An error of a task ends the block. A task that returns has no more work. An error of a callback,
    a thread or a task of `in_background` ends the first block of the event loop.

    Raises UnexpectedError: one of these has failed. The error is its cause.
    """
    block = _Block()
    first = asyncio.get_running_loop().get_exception_handler() is None
    tasks = [block.start(name.replace("_", " "), work) for name, work in works.items()]
    with block.receiving_errors() if first else contextlib.nullcontext():
        try:
            yield
        finally:
            block.over = True
            for task in tasks:
                task.cancel()
            if block.failure is not None:
                raise block.failure


def in_background(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Start work as a task, and keep it in `tasks` until it is done; asyncio does not keep it.

    An error of the work ends the process (see `supervised`).
    """
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(functools.partial(_report, getattr(work, "__qualname__", "work")))
    return task


async def within(work: Awaitable[T], limit_s: float | None) -> T:
    """Return the result of `work`. Raises asyncio.TimeoutError: it takes longer.

    Up to Python 3.11 asyncio.wait_for ignores a cancellation that arrives as `work` ends. Then the
    caller would continue although it was ended.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    except asyncio.CancelledError:
        await _give_up(task)
        raise
    if not done:
        await _give_up(task)
        raise asyncio.TimeoutError
    return task.result()


async def _give_up(task: asyncio.Future[T]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # otherwise the loop reports the error as unseen


def stack_of(error: UnexpectedError) -> str:
    """Return the traceback of the error that was not expected, as text."""
    return "".join(traceback.format_exception(error.__cause__))


def _report(name: str, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        text = f"the task {name!r} failed"
        context = {"message": text, "exception": error, "task": task}
        asyncio.get_running_loop().call_exception_handler(context)


class _Block:
    """One block of `supervised`. failure: the first error."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._in_thread = threading.excepthook  # what handled the errors of threads before
        self.failure: UnexpectedError | None = None
        self.over = False

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of the block."""
        task = asyncio.create_task(work)
        task.add_done_callback(functools.partial(self._on_end, name))
        return task

    def _on_end(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"the task {name!r} failed", error, {"task": task})

    def _fail(self, what: str, error: BaseException, context: dict[str, Any]) -> None:
        if self.failure is not None or self.over:  # asyncio writes the text of a later error
            self._loop.default_exception_handler({"message": what, "exception": error} | context)
            return
        self.failure = UnexpectedError(f"{what}: {error!r}")
        self.failure.__cause__ = error
        self._end()

    def _end(self) -> None:
        if self._task is not None and not self.over:
            self._task.cancel()
            self._loop.call_later(_AGAIN_S, self._end)

    @contextlib.contextmanager
    def receiving_errors(self) -> Iterator[None]:
        """Receive the errors of callbacks and threads during the block."""
        self._in_thread, threading.excepthook = threading.excepthook, self._on_thread
        self._loop.set_exception_handler(self._on_error)
        try:
            yield
        finally:
            self._loop.set_exception_handler(None)
            threading.excepthook = self._in_thread

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error that asyncio reports. It also reports errors of connections here.

        Those concern one connection, which asyncio closes. Only callbacks have a handle.
        """
        error = context.get("exception")
        if error is None or not {"handle", "task"} & context.keys():
            loop.default_exception_handler(context)
        else:
            self._fail(context["message"], error, context)

    def _on_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit:  # a thread may end so
            return
        name = args.thread.name if args.thread is not None else "unknown"
        error = args.exc_value or args.exc_type()
        text = f"the thread {name!r} failed"
        try:
            self._loop.call_soon_threadsafe(self._fail, text, error, {})
        except RuntimeError:  # the loop is closed
            self._in_thread(args)


class BugReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report of a bug.

    inputs: the newest inputs of a coordinator, the oldest first; the last one met the bug.
    """

    at: float
    rekindle: str
    pid: int
    error: str
    traceback: str
    inputs: list[Any] = []


def write_report(folder: Path, process: str, error: BaseException, inputs: list[Any]) -> Path:
    """Write a report of a bug to a new file, which only the owner may read. Return its path."""
    report = BugReport(
        at=time.time(),
        rekindle=names.VERSION,
        pid=os.getpid(),
        error=str(error) if isinstance(error, UnexpectedError) else repr(error),
        traceback="".join(traceback.format_exception(error)),
        inputs=inputs,
    )
    content = msgspec.json.format(msgspec.json.encode(report))
    number = 1
    while True:
        path = folder / f"{process}{names.BUG_FILE}{number}.json"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            number += 1
            continue
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        return path


def reports_in(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the reports of bugs in a job directory, the oldest first, and the error in each."""
    files = folder.glob(f"*{names.BUG_FILE}*.json")
    for file in sorted(files, key=lambda file: file.stat().st_mtime):
        try:
            yield file, msgspec.json.decode(file.read_bytes(), type=BugReport).error
        except msgspec.DecodeError:  # the disk was full
            yield file, "the report is incomplete"


@contextlib.contextmanager
def reported_threads(folder: Path, process: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report each of Rekindle's threads that fails while the block runs. The process continues.

    folder: the job directory, for the reports. say: takes a sentence about each failure.
    """
    before = threading.excepthook

    def on_error(args: threading.ExceptHookArgs) -> None:
        before(args)
        name = args.thread.name if args.thread is not None else ""
        if not name.startswith(names.OUR_THREADS) or args.exc_value is None:
            return
        error = UnexpectedError(f"the thread {name!r} failed: {args.exc_value!r}")
        error.__cause__ = args.exc_value
        try:
            where = f"{write_report(folder, process, error, [])} has its stack"
        except OSError as failed:
            where = f"Rekindle cannot write a report: {failed}"
        say(f"{error}; the job continues without this thread; {where}")

    threading.excepthook = on_error
    try:
        yield
    finally:
        threading.excepthook = before
