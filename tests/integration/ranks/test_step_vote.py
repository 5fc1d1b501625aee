"""The gate before a step: all ranks do the step, or no rank does."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from waiting import bound_s, join, result_of, wait_until

from rekindle.errors import SessionError, StaleError, UnexpectedError
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank.step_vote import (
    HELLO_BYTES,
    STATE,
    Listener,
    PeerGoneError,
    RunIdentity,
    StepVote,
    call,
)

T = TypeVar("T")


class World:
    """Ranks as threads, each with its own listener."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.listeners = [Listener() for _ in range(size)]
        self.pool = ThreadPoolExecutor(max_workers=size)
        self.gates: list[StepVote] = []

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Return the addresses of all listeners."""
        return [("127.0.0.1", listener.port) for listener in self.listeners]

    def form(self, generation: int, *absent: int) -> list[Future[None]]:
        """Form the gate of a generation on all ranks except the absent ones."""
        for gate in self.gates:
            gate.leave()
        self.gates = [StepVote(listener, HeartbeatPage()) for listener in self.listeners]
        return [
            self.pool.submit(gate.form, generation, place, self.addresses)
            for place, gate in enumerate(self.gates)
            if place not in absent
        ]

    def formed(self, generation: int = 1) -> World:
        """Form the gate of a generation on all ranks and wait for its end."""
        for each in self.form(generation):
            result_of(each)
        return self

    def on_all(self, what: Callable[[int], T]) -> list[Future[T]]:
        """Run a function on all ranks at the same time."""
        return [self.pool.submit(what, place) for place in range(self.size)]

    def agree_or_leave(self, place: int, step: int) -> bool:
        """Agree on a step; after an error leave the gate, as the end of a process does."""
        try:
            return self.gates[place].agree(step, can=True)
        except (SessionError, PeerGoneError):
            self.gates[place].leave()
            raise

    def close(self) -> None:
        """Leave all gates, close all listeners and stop the threads."""
        for gate in self.gates:
            gate.leave()
        for listener in self.listeners:
            listener.close()
        self.pool.shutdown()


@pytest.fixture(params=[1, 2, 3, 4, 5, 8, 9])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Return a world of each size in turn."""
    made = World(request.param)
    yield made
    made.close()


@pytest.fixture
def four() -> Iterator[World]:
    """Return a world of four ranks."""
    made = World(4)
    yield made
    made.close()


def test_all_pass_if_all_can(world: World) -> None:
    """If all ranks can do a step, all pass the gate, at many steps and world sizes."""
    world.formed()
    for step in range(20):
        agreed = world.on_all(lambda place, at=step: world.gates[place].agree(at, can=True))
        assert [result_of(each) for each in agreed] == [True] * world.size


def test_nobody_passes_if_one_cannot(world: World) -> None:
    """If one rank cannot do a step, no rank passes; the gate then serves the next step."""
    world.formed()
    for lame in range(world.size):

        def agree(place: int, lame: int = lame) -> bool:
            return world.gates[place].agree(lame, can=place != lame)

        assert not any(result_of(each) for each in world.on_all(agree))
    agreed = world.on_all(lambda place: world.gates[place].agree(99, can=True))
    assert all(result_of(each) for each in agreed)


def test_nobody_passes_before_all_have_come(four: World) -> None:
    """Three ranks wait during 50 steps of another world; they pass when the fourth arrives."""
    four.formed()
    early = [four.pool.submit(four.gates[place].agree, 0, can=True) for place in (0, 1, 3)]
    with contextlib.closing(World(2).formed()) as others:
        for step in range(50):
            agreed = others.on_all(lambda place, at=step: others.gates[place].agree(at, can=True))
            assert all(result_of(each) for each in agreed)
    assert not any(each.done() for each in early)
    assert four.gates[2].agree(0, can=True)
    assert all(result_of(each) for each in early)


def test_a_rank_that_waits_shows_it() -> None:
    """The heartbeat page of a rank shows a wait at the gate, and no wait after it."""
    world = World(2)
    page = HeartbeatPage(HeartbeatPage.create("test"))
    try:
        world.gates = [
            StepVote(world.listeners[0], page),
            StepVote(world.listeners[1], HeartbeatPage()),
        ]
        formed = world.on_all(lambda place: world.gates[place].form(1, place, world.addresses))
        for each in formed:
            result_of(each)
        waits = world.pool.submit(world.gates[0].agree, 0, can=True)
        wait_until(lambda: page.waiting_since_ns, "a rank that waits")
        assert world.gates[1].agree(0, can=True)
        assert result_of(waits)
        assert not page.waiting_since_ns
        assert page.operations == 1
    finally:
        world.close()
        page.close()


def test_a_rank_that_is_gone_is_told(four: World) -> None:
    """If one rank leaves, no rank passes: all ranks that wait get PeerGoneError."""
    four.formed()
    waits = [four.pool.submit(four.agree_or_leave, place, 0) for place in (0, 1, 2)]
    four.gates[3].leave()
    for each in waits:
        with pytest.raises(PeerGoneError):
            result_of(each)


def test_ranks_at_different_steps_are_refused(four: World) -> None:
    """Ranks at different steps get an error with the step: their datasets differ in length."""
    four.formed()
    agreed = four.on_all(lambda place: four.agree_or_leave(place, 7 + (place == 2)))
    errors = [each.exception(bound_s()) for each in agreed]
    assert {type(error) for error in errors} <= {SessionError, PeerGoneError}
    assert any("step 8" in str(error) and "batches" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        (
            {"run": RunIdentity(30, 7)},
            {"run": RunIdentity(29, 7)},
            "30 steps, but another rank has 29|29 .* 30",
        ),
        ({"run": RunIdentity(30, 7)}, {"run": RunIdentity(30, 8)}, "started with other parameters"),
        ({"ends": True}, {}, "ended its training after step 7"),
    ],
)
def test_ranks_of_different_runs_are_refused(
    four: World, mine: dict[str, Any], theirs: dict[str, Any], text: str
) -> None:
    """Ranks with other numbers of steps, parameters or ends of training get an error.

    Otherwise some ranks would train without the others or wait for them without end.
    """
    four.formed()

    def agree(place: int) -> bool:
        try:
            return four.gates[place].agree(7, can=True, **(theirs if place == 2 else mine))
        finally:
            four.gates[place].leave()  # as the end of a process does

    errors = [each.exception(bound_s()) for each in four.on_all(agree)]
    assert {type(error) for error in errors} <= {SessionError, PeerGoneError, StaleError}
    assert any(re.search(text, str(error)) for error in errors), errors


def test_all_end_behind_the_same_step(world: World) -> None:
    """All ranks of a run end their training after the same step."""
    world.formed()
    run = RunIdentity(30, 7)
    ended = world.on_all(lambda at: world.gates[at].agree(30, can=True, ends=True, run=run))
    assert all(result_of(each) for each in ended)


def test_severed_while_it_is_formed(four: World) -> None:
    """`sever` ends the wait for an absent rank, and the next generation forms.

    Ranks 0 and 3 wait for the absent rank. Rank 1 does not: it may have formed before the sever.
    """
    at_0, at_1, at_3 = four.form(1, 2)
    for gate in four.gates:
        gate.sever()
    for each in (at_0, at_3):
        with pytest.raises((StaleError, PeerGoneError)):
            result_of(each)
    assert isinstance(at_1.exception(bound_s()), StaleError | PeerGoneError | None)
    four.formed(2)
    agreed = four.on_all(lambda place: four.gates[place].agree(0, can=True))
    assert all(result_of(each) for each in agreed)


def test_lines_of_earlier_generations_and_strangers_change_nothing(four: World) -> None:
    """The gate closes connections of earlier generations and of other programs.

    The ranks then pass the gate.
    """
    four.formed(5)
    host, port = four.addresses[0]
    late = StepVote(four.listeners[1], HeartbeatPage())
    late._generation, late._place = 4, 1
    connection = late.connect((host, port), 1)
    assert connection.recv(1) == b""
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n".ljust(HELLO_BYTES))
        assert stranger.recv(1) == b""
    late.leave()
    agreed = four.on_all(lambda place: four.gates[place].agree(0, can=True))
    assert all(result_of(each) for each in agreed)


def test_a_state_goes_over_a_line_of_its_own(four: World) -> None:
    """A state uses its own connection, which does not block the gate."""
    four.formed()
    sends = four.pool.submit(lambda: four.gates[0].accept(2, STATE).sendall(b"state"))
    connection = four.gates[2].connect(four.addresses[0], STATE)
    assert connection.recv(5, socket.MSG_WAITALL) == b"state"
    result_of(sends)


def test_nobody_answers(four: World) -> None:
    """The error of a rank that cannot be reached has its address."""
    gate = StepVote(four.listeners[0], HeartbeatPage())
    four.listeners[1].close()
    with pytest.raises(PeerGoneError, match=r"no rank answers at 127\.0\.0\.1:\d+"):
        gate.form(1, 0, four.addresses)
    gate.leave()


def test_what_one_rank_has_to_say_all_hear(world: World) -> None:
    """`gather` gives each rank the messages of all ranks, in rank order.

    The gate then works as before.
    """
    world.formed()
    for talkers in ({0}, set(), {0, world.size - 1}, set(range(world.size))):

        def gather(place: int, talkers: set[int] = talkers) -> list[bytes]:
            return world.gates[place].gather(f"rank {place}".encode() if place in talkers else b"")

        expected = [f"rank {place}".encode() for place in sorted(talkers)]
        assert [result_of(each) for each in world.on_all(gather)] == [expected] * world.size
    agreed = world.on_all(lambda place: world.gates[place].agree(0, can=True))
    assert all(result_of(each) for each in agreed)


def test_what_is_said_at_a_gate_that_is_severed_reaches_nobody(four: World) -> None:
    """If the gate is severed, a rank that waits in `gather` gets StaleError."""
    four.formed()
    waits = four.pool.submit(four.gates[0].gather, b"something")
    four.gates[0].sever()
    with pytest.raises(StaleError):
        result_of(waits)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


@pytest.fixture
def thread(request: pytest.FixtureRequest) -> threading.Thread:
    """Return the thread of the fixture `listener`. Other tests may have left threads."""
    before = listener_threads()
    request.getfixturevalue("listener")
    [made] = listener_threads() - before
    return made


def _newest_fd() -> int:
    return max(int(each.name) for each in Path("/proc/self/fd").iterdir())


def listener_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "rekindle-listener"}


def test_too_many_open_files_delay_a_connection(
    listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank without free descriptors accepts a caller later, and reports the problem once."""
    first = call(("127.0.0.1", listener.port), 1, 0, 1)  # this imports modules
    with first, listener.take(1, 0, 1, lambda: False):
        pass
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (_newest_fd() + 4, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        os.close(held.pop())  # one for the caller, and none for the listener
        caller = call(("127.0.0.1", listener.port), 1, 0, 0)
        err = wait_until(lambda: capfd.readouterr().err, "the report")
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "the rank cannot accept a connection, and tries again" in err
    with caller, listener.take(1, 0, 0, lambda: False) as taken:
        caller.sendall(b"x")
        assert taken.recv(1) == b"x"
    assert capfd.readouterr().err == ""


def test_a_listener_that_fails_is_no_silent_wait(
    thread: threading.Thread, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the thread ends with an error, the waiting rank and all later ones get it."""

    def fail() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(listener, "_accept_one", fail)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(listener.take, 1, 0, 0, lambda: False)
        with socket.create_connection(("127.0.0.1", listener.port)):
            join(thread)
        for taken in (waiting, pool.submit(listener.take, 2, 0, 0, lambda: False)):
            with pytest.raises(UnexpectedError, match="this rank accepts no connections: KeyError"):
                result_of(taken)


def test_a_closed_listener_ends_its_thread(
    thread: threading.Thread, listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    """The end of the listener is no error."""
    listener.close()
    join(thread)
    assert capfd.readouterr().err == ""
