"""A rank's channel: answers of the agent that arrive late, out of order, or unwanted."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from waiting import bound_s, join, wait_set

from rekindle.protocol import agent as protocol
from rekindle.rank.channel import Channel


class Line:
    """A channel, the agent's end of its socket, and a pipe to send."""

    def __init__(self) -> None:
        self.agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = Channel(theirs.detach())
        self.read_end, self.write_end = os.pipe()
        self.over_received = threading.Event()
        self.channel.on_over = lambda over: self.over_received.set()

    def answer(self, serial: int) -> None:
        """Send the answer to a request, with one descriptor: the write end of the pipe."""
        message = protocol.encode(protocol.BufferGrant(serial=serial))
        socket.send_fds(self.agent, [message], [self.write_end])

    def all_heard(self, generation: int) -> None:
        """End the generation, and wait until the channel has handled this and earlier messages."""
        self.over_received.clear()
        self.agent.send(
            protocol.encode(protocol.GenerationEnded(generation=generation, finished=0))
        )
        wait_set(self.over_received)


@pytest.fixture
def line() -> Iterator[Line]:
    found = Line()
    os.dup(found.agent.fileno())  # never closed: a rank whose agent is gone kills its process
    yield found
    found.agent.close()
    os.close(found.read_end)
    with contextlib.suppress(OSError):
        os.close(found.write_end)


def is_open_elsewhere(line: Line) -> bool:
    """Close the test's write end, and return whether another descriptor of it is open."""
    os.close(line.write_end)
    os.set_blocking(line.read_end, False)
    try:
        return os.read(line.read_end, 1) != b""
    except BlockingIOError:
        return True


def test_an_answer_is_kept_for_whoever_asked(line: Line) -> None:
    """If the answers arrive in another order, each request still gets its own answer."""
    line.answer(2)
    line.answer(1)
    second, first = (line.channel.buffers(n, bound_s()) for n in (2, 1))
    assert first is not None
    assert second is not None
    assert (first[0].serial, second[0].serial) == (1, 2)
    for fd in (*first[1], *second[1]):
        os.close(fd)
    assert not is_open_elsewhere(line)


@pytest.mark.parametrize("late", [True, False])
def test_what_nobody_waits_for_is_closed(line: Line, late: bool) -> None:
    """If a rank forgets a request, the channel closes the descriptors, before or after arrival."""
    if late:
        line.channel.forget(1)
        line.answer(1)
        line.all_heard(1)
    else:
        line.answer(1)
        line.all_heard(1)
        line.channel.forget(1)
    assert line.channel.buffers(1, 0.0) is None
    assert not is_open_elsewhere(line)


def test_nobody_waits_longer_than_the_generation_goes_on(line: Line) -> None:
    """A request waits no longer than its generation lasts, also if that has ended already."""
    found: list[object] = []
    waits = threading.Thread(
        target=lambda: found.append(line.channel.buffers(1, None, generation=3))
    )
    waits.start()
    line.all_heard(2)
    assert waits.is_alive()
    line.all_heard(3)
    join(waits)
    assert found == [None]
    assert line.channel.buffers(1, None, generation=3) is None
