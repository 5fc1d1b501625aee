"""Threads that write the output of ranks, and the consequences of one file's error."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from jobs.driver import spec_of
from waiting import turn_until

from rekindle.agent import output
from rekindle.agent.output import Output, open_logs
from rekindle.agent.threads import in_thread, started
from rekindle.errors import UsageError
from rekindle.writer import Target, Worker


def test_a_worker_survives_work_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """If a worker's task fails, the worker prints the error and does the next task."""
    done: list[int] = []
    worker = Worker("test")
    worker.do(lambda: 1 / 0)
    worker.do(lambda: done.append(1))
    worker.close(10.0)
    assert done == [1]
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_worker_that_hangs_is_left() -> None:
    read, write = os.pipe()
    worker = Worker("test")
    worker.do(lambda: os.read(read, 1))
    worker.close(0.3)
    os.write(write, b"x")
    worker.close(10.0)
    os.close(read)
    os.close(write)


def test_an_error_of_a_file_is_reported_once() -> None:
    """A file's error is reported once, from a write or from close.

    Some file systems report a full quota only at close.
    """
    lost: list[str] = []
    worker = Worker("test")
    read, write = os.pipe()
    os.close(read)
    target = Target(write, lost.append)
    target.put(worker, b"x")
    target.put(worker, b"y")
    worker.do(target.close)
    worker.do(target.close)
    worker.close(10.0)
    assert lost == ["Broken pipe"]
    assert target.waiting == 0


def test_the_rest_of_a_rank_that_prints_more_than_its_file_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a rank prints faster than the file accepts it, the rank waits, and no line is lost."""
    monkeypatch.setattr(output, "_MOST_WAITING", 1 << 14)
    spec = spec_of(nodes=1, processes=1)

    async def prints() -> bytes:
        outputs = Output(spec)
        logs = open_logs(tmp_path / "logs")
        stream, other = outputs.streams(0, logs)
        written = b"line\n" * 200_000
        begin, rest = os.dup(stream.fd), written
        stream.started()
        other.started()

        def write() -> None:
            left = memoryview(rest)
            while left:
                left = left[os.write(begin, left[:4096]) :]
            os.close(begin)

        await in_thread(write)
        await turn_until(lambda: stream._read < 0, "the end of the stream")
        outputs.close()
        assert (tmp_path / "logs/stdout.log").read_bytes() == written
        return written

    assert asyncio.run(prints())


def test_a_result_that_nobody_waits_for_is_discarded() -> None:
    """A result that arrives after the cancellation goes to the function that discards it.

    In this way the agent closes files that opened too late.
    """

    async def late() -> list[int]:
        discarded: list[int] = []
        read, write = os.pipe()
        opens = started(lambda: len(os.read(read, 1)), discarded.append)
        opens.cancel()
        os.write(write, b"x")
        await turn_until(lambda: discarded, "the result")
        os.close(read)
        os.close(write)
        return discarded

    assert asyncio.run(late()) == [1]


def test_a_log_that_cannot_be_opened_leaves_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "logs/stderr.log").mkdir(parents=True)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(UsageError, match="Is a directory"):
        open_logs(tmp_path / "logs")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
