"""Ranks as threads that use MindIO's names. The test acts as their agents and coordinator."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from waiting import bound_s, result_of

from rekindle import names
from rekindle.protocol import agent as protocol
from rekindle.rank.channel import Channel
from rekindle.recovery.policy.plan import RankPlan, StateSource
from rekindle.training.mindio.enums import ReportState
from rekindle.training.mindio.handlers import Handlers
from rekindle.training.mindio.processor import Processor

_KINDS = ("stop", "clean", "rebuild_group", "repair", "rollback", "save_ckpt", "rename", "exit")
ARGUMENTS, CONTEXT = "the loop's arguments", "the context"

_all: list[Rank] = []

M = TypeVar("M", bound=protocol.Message)
T = TypeVar("T")


class Rank:
    """One rank, whose handlers record their calls.

    `takes_in`: whether MindIO's ARF is on.
    `calls`: the name and the arguments of each handler call, in order.
    `answers`: what a handler returns, or a function that returns or raises it.
    """

    def __init__(self, rank: int, *, takes_in: bool = False) -> None:
        self.rank, self.calls, self.answers = rank, [], {}  # type: ignore[var-annotated]
        self._agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _all.append(self)  # never closed: a rank without an agent kills its process
        self._agent.settimeout(bound_s())
        handlers = Handlers()
        handlers.arguments = ARGUMENTS
        for kind in _KINDS:
            handlers.register(kind, self._note(kind), CONTEXT)
        handlers.register("stream_sync", self._note("stream_sync"), CONTEXT)
        channel = Channel(theirs.detach())
        self.processor = Processor(rank, handlers, channel, takes_in=takes_in)

    def _note(self, kind: str) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            self.calls.append((kind, *arguments))
            answer = self.answers.get(kind)
            return answer() if callable(answer) else answer

        return note

    def hear(self, kind: type[M]) -> M:
        """Receive the next message and check its type."""
        message = protocol.decode_from_rank(self._agent.recv(128 * 1024))
        assert isinstance(message, kind), message
        return message

    def tell(self, message: protocol.Message) -> None:
        """Send a message."""
        self._agent.send(protocol.encode(message))


def form_of(
    rank: int, plan: RankPlan, ports: list[int], generation: int = 2, step: int = 2
) -> protocol.FormGeneration:
    """Return the message that forms a generation, for one rank.

    `ports`: the ports of all ranks of the world.
    """
    return protocol.FormGeneration(
        generation=generation,
        world_size=len(ports),
        store_host="",
        store_port=0,
        step=step,
        ranks={rank: rank},
        plan={rank: plan},
        peers=tuple(("127.0.0.1", port) for port in ports),
    )


class World:
    """A number of ranks, and the threads in which they run."""

    def __init__(self, size: int, *, takes_in: bool = False) -> None:
        self.ranks = [Rank(number, takes_in=takes_in) for number in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def on_all(self, what: Callable[[Processor], T]) -> list[Future[T]]:
        """Call a function for all ranks at the same time."""
        return [self.pool.submit(what, rank.processor) for rank in self.ranks]

    def form(self, generation: int, step: int, plans: list[RankPlan]) -> list[protocol.Arrived]:
        """Wait until all ranks have arrived, form a generation, and return their messages."""
        arrived = [rank.hear(protocol.Arrived) for rank in self.ranks]
        ports = [each.port for each in arrived]
        for rank in self.ranks:
            rank.tell(form_of(rank.rank, plans[rank.rank], ports, generation, step))
        return arrived

    def ready(self, finished: int) -> None:
        """Wait until all ranks report their state and its number of finished steps."""
        for rank in self.ranks:
            ready = rank.hear(protocol.StateReady)
            assert (ready.error, ready.finished) == ("", finished)

    def start(self) -> World:
        """Form the first generation."""
        started = self.on_all(lambda each: each.start())
        self.form(1, 0, [RankPlan(source=StateSource.FRESH)] * len(self.ranks))
        self.ready(0)
        for each in started:
            result_of(each)
        return self

    def step(self, number: int) -> None:
        """Let all ranks do a step."""
        for rank in self.ranks:
            rank.processor.begin_update()
            rank.processor.end_update(number)

    def over(self, generation: int, finished: int, *, process_lost: bool = False) -> None:
        """Report the end of a generation to all ranks."""
        over = protocol.GenerationEnded(
            generation=generation, finished=finished, process_lost=process_lost
        )
        for rank in self.ranks:
            rank.tell(over)

    def replace(
        self, place: int, monkeypatch: pytest.MonkeyPatch, *, takes_in: bool = True
    ) -> Rank:
        """Replace the process of a rank by a new one that joins the others."""
        self.ranks[place].processor.generations.gate.leave()  # as the end of the old process does
        monkeypatch.setenv(names.ENV_JOINS, "1")
        self.ranks[place] = Rank(place, takes_in=takes_in)
        monkeypatch.delenv(names.ENV_JOINS)
        return self.ranks[place]

    def recover(self, *states: ReportState) -> list[Future[bool]]:
        """Let each rank report its state and wait until it is repaired."""

        def retry(place: int) -> bool:
            processor = self.ranks[place].processor
            processor.report(states[place], "", None)
            return processor.wait_clean() and processor.wait_repaired()

        return [self.pool.submit(retry, place) for place in range(len(self.ranks))]

    def close(self) -> None:
        """Close the gates of all ranks and end the threads."""
        for rank in self.ranks:
            rank.processor.generations.gate.leave()
        self.pool.shutdown()
