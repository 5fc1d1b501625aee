"""Errors of tasks, callbacks and threads: each ends the block that runs them, with its name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import finished, join, turns

from rekindle.errors import UnexpectedError
from rekindle.supervised import (
    in_background,
    reported_threads,
    reports_in,
    stack_of,
    supervised,
)


async def fail() -> None:
    raise KeyError("a bug")


def fail_at_once(*_: object) -> None:
    raise KeyError("a bug")


async def wait() -> None:
    await asyncio.Event().wait()


def a_task() -> None:
    in_background(fail(), set())


def a_callback() -> None:
    asyncio.get_running_loop().call_soon(fail_at_once)


def a_timer() -> None:
    asyncio.get_running_loop().call_later(0, fail_at_once)


def a_thread() -> None:
    threading.Thread(target=fail_at_once, name="works").start()


PARTS = {
    a_task: "the task 'fail' failed: KeyError('a bug')",
    a_callback: "Exception in callback fail_at_once()",
    a_timer: "Exception in callback fail_at_once()",
    a_thread: "the thread 'works' failed: KeyError('a bug')",
}


def test_a_task_ends_its_block() -> None:
    """The error names the task, and has the traceback. The block gets no result."""

    async def run() -> None:
        async with supervised(the_heart=fail(), other=wait()):
            await wait()

    with pytest.raises(UnexpectedError) as caught:
        asyncio.run(finished(run()))
    assert str(caught.value) == "the task 'the heart' failed: KeyError('a bug')"
    assert "in fail" in stack_of(caught.value)


@pytest.mark.parametrize("begin", PARTS)
@pytest.mark.parametrize("inner", [False, True], ids=["", "inside of another block"])
def test_other_parts_end_the_first_block(begin: Callable[[], None], inner: bool) -> None:
    """An error in a callback, in a task of the background or in a thread ends the process."""

    async def run() -> None:
        async with supervised(other=wait()):
            begin()
            if not inner:
                await wait()
            async with supervised(inner=wait()):
                await wait()

    with pytest.raises(UnexpectedError) as caught:
        asyncio.run(finished(run()))
    assert str(caught.value).startswith(PARTS[begin])
    assert repr(caught.value.__cause__) == "KeyError('a bug')"


def test_a_block_ends_although_it_loses_a_cancellation() -> None:
    """asyncio may lose a cancellation. The block then gets another one."""
    lost = []

    async def run() -> None:
        async with supervised(task=fail()):
            try:
                await wait()
            except asyncio.CancelledError:
                lost.append(True)
            await wait()

    with pytest.raises(UnexpectedError):
        asyncio.run(finished(run()))
    assert lost


def test_the_first_error_counts(caplog: pytest.LogCaptureFixture) -> None:
    """The block raises the first error; a later one is in the log with its task."""

    async def fail_later() -> None:
        await asyncio.sleep(0)
        raise ValueError("a second bug")

    async def run() -> None:
        async with supervised(first=fail(), second=fail_later()):
            try:
                await wait()
            finally:
                await turns()

    with pytest.raises(UnexpectedError, match="the task 'first' failed"):
        asyncio.run(finished(run()))
    assert "the task 'second' failed" in caplog.text
    assert "a second bug" in caplog.text


def test_a_task_without_more_work_ends_nothing() -> None:
    """A task may return. The block continues, and its other tasks end with it."""
    ended = []

    async def work() -> None:
        try:
            await wait()
        finally:
            ended.append("work")

    async def run() -> str:
        async with supervised(done=asyncio.sleep(0), work=work()):
            await turns()
            assert not ended
        await turns()
        return "result"

    assert asyncio.run(finished(run())) == "result"
    assert ended == ["work"]


def test_an_error_of_the_block_is_its_own() -> None:
    """An error that the block raises, and a cancellation from outside, stay as they are."""

    async def run(error: BaseException) -> None:
        async with supervised(other=wait()):
            raise error

    for error in (ValueError("own"), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            asyncio.run(finished(run(error)))


def test_the_trouble_of_a_connection_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio reports errors of connections and sockets. They are logged, and nothing ends."""

    async def run() -> None:
        async with supervised():
            error = OSError("too many open files")
            context = {"message": "accept failed", "exception": error, "socket": None}
            asyncio.get_running_loop().call_exception_handler(context)
            await turns()

    asyncio.run(finished(run()))
    assert "accept failed" in caplog.text


def test_a_loop_and_threads_are_as_before() -> None:
    """After the block, errors of callbacks and threads go where they went before."""
    before = threading.excepthook

    async def run() -> None:
        async with supervised():
            assert threading.excepthook is not before
        assert asyncio.get_running_loop().get_exception_handler() is None

    asyncio.run(finished(run()))
    assert threading.excepthook is before


@pytest.fixture
def plain_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python write the errors of threads, as outside of pytest."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)


@pytest.mark.usefixtures("plain_threads")
def test_a_thread_that_its_process_can_miss_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A flow's process continues without a thread. A report and a sentence name the thread."""
    said: list[str] = []
    with reported_threads(tmp_path, "flow", said.append):
        for name in ("rekindle-works", "theirs", "rekindle-works"):
            thread = threading.Thread(target=fail_at_once, name=name)
            thread.start()
            join(thread)
    error = "the thread 'rekindle-works' failed: KeyError('a bug')"
    files = [tmp_path / f"flow-bug-{number}.json" for number in (1, 2)]
    assert sorted(reports_in(tmp_path)) == [(file, error) for file in files]
    assert [each.partition(";")[0] for each in said] == [error, error]
    assert str(files[1]) in said[1]
    assert capfd.readouterr().err.count("in fail_at_once") == 3


@pytest.mark.usefixtures("plain_threads")
def test_a_report_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """On a full disk the sentence still names the thread, and why there is no report."""
    said: list[str] = []
    with reported_threads(tmp_path / "absent", "flow", said.append):
        thread = threading.Thread(target=fail_at_once, name="rekindle-works")
        thread.start()
        join(thread)
    assert "the thread 'rekindle-works' failed" in said[0]
    assert "Rekindle cannot write a report: [Errno 2] No such file" in said[0]


def test_an_incomplete_report_is_listed(tmp_path: Path) -> None:
    """A report that the disk had no room for is in the list."""
    file = tmp_path / "coordinator-bug-1.json"
    file.write_text("{")
    assert [*reports_in(tmp_path)] == [(file, "the report is incomplete")]
