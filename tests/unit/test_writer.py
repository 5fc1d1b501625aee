"""The console: all prints of the agent pass through one thread, and nothing waits for a stream."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TextIO

import pytest
from waiting import bound_s, join, run_command

from rekindle import console, writer
from rekindle.writer import Console, Target


class Held:
    """A console whose streams lead to full pipes, until the test reads from them."""

    def __init__(self, *, blocking: bool = True) -> None:
        self.console = Console()
        self._reads: dict[int, int] = {}
        self._writes: dict[int, int] = {}
        for fd in (1, 2):
            self._reads[fd], self._writes[fd] = os.pipe()
            os.set_blocking(self._writes[fd], False)
            try:
                while True:
                    os.write(self._writes[fd], b"\0")
            except BlockingIOError:
                os.set_blocking(self._writes[fd], blocking)
            self.console._targets[fd] = Target(self._writes[fd])

    def read(self) -> list[bytes]:
        """Take all data of both streams and close them. Return the data without the filling."""
        taken = {fd: bytearray() for fd in (1, 2)}

        def take(fd: int) -> None:
            while data := os.read(self._reads[fd], 1 << 16):
                taken[fd] += data

        threads = [threading.Thread(target=take, args=(fd,)) for fd in (1, 2)]
        for thread in threads:
            thread.start()
        self.console.flush(bound_s())
        for fd in (1, 2):
            os.close(self._writes[fd])
        for thread in threads:
            join(thread)
        for fd in (1, 2):
            os.close(self._reads[fd])
        return [bytes(taken[fd]).replace(b"\0", b"") for fd in (1, 2)]


@pytest.fixture
def held() -> Held:
    return Held()


def test_lines_wait_for_a_held_stream(held: Held) -> None:
    """Lines that wait for a reader keep their order, and none is lost."""
    for number in range(1000):
        held.console.show(1, b"rank %d\n" % number)
        held.console.say(2, b"agent %d\n" % number)
    shown, own_output = held.read()
    assert shown == b"".join(b"rank %d\n" % number for number in range(1000))
    assert own_output == b"".join(b"agent %d\n" % number for number in range(1000))


def test_a_stream_that_does_not_block_loses_no_line() -> None:
    """A full stream with O_NONBLOCK, as a terminal of another process, gets all lines later."""
    held = Held(blocking=False)
    held.console.show(1, b"rank\n")
    held.console.say(2, b"agent\n")
    assert held.read() == [b"rank\n", b"agent\n"]


class Printing:
    """A text that prints two lines when a stream appends it, as a destructor may do there."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __radd__(self, text: str) -> str:
        self.stream.write("inner one\ninner two\n")
        return text + "outer\n"

    def __len__(self) -> int:
        return 6


def test_a_destructor_prints_while_its_thread_prints(held: Held) -> None:
    """A print inside of a print of the same thread loses and repeats nothing."""
    console.write_with(held.console.say)
    stream = writer._Text(2)
    stream.write("part of the ")
    stream.write(Printing(stream))
    assert sorted(held.read()[1].splitlines()) == [
        b"inner two",
        b"rekindle: inner one",
        b"rekindle: part of the outer",
    ]


def test_a_thread_that_keeps_the_lock_delays_nobody_for_long(held: Held) -> None:
    """A print that cannot get the console's lock continues. Its holder may wait for the printer."""
    printing = threading.Thread(target=held.console.say, args=(2, b"agent\n"))
    with held.console._lock:
        printing.start()
        join(printing)
    assert held.read()[1] == b"agent\n"


def test_too_many_lines_are_dropped_and_counted(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream with too much waiting drops whole lines. Their number is in their place."""
    monkeypatch.setattr(writer, "_MOST_SHOWN", 10)
    monkeypatch.setattr(writer, "_MOST_SAID", 10)
    held.console.show(1, b"kept by a rank\n")
    held.console.show(1, b"lost\nlost\n")
    held.console.say(1, b"kept by the agent\n")
    held.console.say(1, b"lost\n")
    shown, own_output = held.read()
    missing = b"rekindle: the stream accepted no data; lines missing here: %d\n"
    assert shown == (b"kept by a rank\n" + missing % 2 + b"kept by the agent\n" + missing % 1), (
        shown
    )
    assert own_output == b""


def test_a_stream_that_hangs_keeps_only_lines_of_the_agent(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's lines are also in its file. Those of the agent exist nowhere else."""
    held.console.show(2, b"rank\n")
    monkeypatch.setattr(writer, "HANGS_S", -1.0)
    held.console.show(2, b"lost\n")
    held.console.say(2, b"agent\n")
    monkeypatch.undo()
    missing = b"rekindle: the stream accepted no data; lines missing here: 1\n"
    assert held.read()[1] == b"rank\n" + missing + b"agent\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code after `take_streams`, to the end of its process."""
    begin = (
        "import os, sys, warnings\nfrom rekindle.console import Process, say, start\n"
        "from rekindle.writer import take_streams\n"
        "start(Process.AGENT, form='short')\ntake_streams()\n"
    )
    return run_command([sys.executable, "-c", f"{begin}{code}"])


@pytest.mark.process
def test_a_process_prints_all_before_its_end() -> None:
    """Prints, warnings, a line without an end and the last traceback reach the streams."""
    ended = run(
        "say('first')\nprint('out', end='')\nwarnings.warn('careful')\n"
        "print('ä\\udc80 no end', end='', file=sys.stderr)\nraise ValueError('last')"
    )
    assert ended.returncode == 1
    assert ended.stdout == "rekindle agent: out\n"
    assert ended.stderr.startswith("rekindle agent: first\n")
    assert "UserWarning: careful" in ended.stderr
    assert "ä\\udc80 no end" in ended.stderr
    assert ended.stderr.endswith("ValueError: last\n")


@pytest.mark.process
def test_a_process_ends_although_its_stream_is_held() -> None:
    """The end of a process waits for a stream without progress only for a short time."""
    read, write = os.pipe()
    code = (
        "from rekindle.writer import take_streams\nfrom rekindle.console import say\n"
        "take_streams()\nsay('x' * 200_000)\nsay('end')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=write)
    os.close(write)
    assert process.wait(bound_s()) == 0
    os.close(read)
