"""Ranks as threads behind MindIO's names; the test is their agents and their coordinator."""

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
    """One rank, whose handlers take notes.

    takes_in: with MindIO's ARF. calls: what handlers were called with, in their order. answers:
    what they give, or raise.
    """

    def __init__(self, rank: int, *, takes_in: bool = False) -> None:
        self.rank, self.calls, self.answers = rank, [], {}  # type: ignore[var-annotated]
        self._agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _all.append(self)  # never closed: a rank whose agent is gone kills its process
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
        """Receive a message of this kind, the next that comes."""
        message = protocol.decode_from_rank(self._agent.recv(128 * 1024))
        assert isinstance(message, kind), message
        return message

    def tell(self, message: protocol.Message) -> None:
        """Send a message."""
        self._agent.send(protocol.encode(message))


def form_of(
    rank: int, plan: RankPlan, ports: list[int], generation: int = 2, step: int = 2
) -> protocol.FormGeneration:
    """What a rank is told of a generation. ports: of all of its world."""
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
    """Some ranks, and the threads that they run in."""

    def __init__(self, size: int, *, takes_in: bool = False) -> None:
        self.ranks = [Rank(number, takes_in=takes_in) for number in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def on_all(self, what: Callable[[Processor], T]) -> list[Future[T]]:
        """Do it on all ranks at the same time."""
        return [self.pool.submit(what, rank.processor) for rank in self.ranks]

    def form(self, generation: int, step: int, plans: list[RankPlan]) -> list[protocol.Arrived]:
        """Wait for all to arrive, and have them form a generation; returns what they said."""
        arrived = [rank.hear(protocol.Arrived) for rank in self.ranks]
        ports = [each.port for each in arrived]
        for rank in self.ranks:
            rank.tell(form_of(rank.rank, plans[rank.rank], ports, generation, step))
        return arrived

    def ready(self) -> None:
        """Wait until all say that they have their state."""
        assert [rank.hear(protocol.StateReady).error for rank in self.ranks] == [""] * len(
            self.ranks
        )

    def start(self) -> World:
        """All meet for the first time."""
        started = self.on_all(lambda each: each.start())
        self.form(1, 0, [RankPlan(source=StateSource.FRESH)] * len(self.ranks))
        self.ready()
        for each in started:
            result_of(each)
        return self

    def step(self, number: int) -> None:
        """All do a step."""
        for rank in self.ranks:
            rank.processor.begin_update()
            rank.processor.end_update(number)

    def over(self, generation: int, finished: int, *, replaced: bool = False) -> None:
        """Tell all that a generation is over."""
        over = protocol.GenerationEnded(generation=generation, finished=finished, replaced=replaced)
        for rank in self.ranks:
            rank.tell(over)

    def replace(
        self, place: int, monkeypatch: pytest.MonkeyPatch, *, takes_in: bool = True
    ) -> Rank:
        """Have a new process in this place, which is to join the others."""
        self.ranks[place].processor.generations.gate.leave()  # as the end of the old one does
        monkeypatch.setenv(names.ENV_JOINS, "1")
        self.ranks[place] = Rank(place, takes_in=takes_in)
        monkeypatch.delenv(names.ENV_JOINS)
        return self.ranks[place]

    def recover(self, *states: ReportState) -> list[Future[bool]]:
        """Have each rank report its state, and wait until it is repaired."""

        def retry(place: int) -> bool:
            processor = self.ranks[place].processor
            processor.report(states[place], "", None)
            return processor.wait_clean() and processor.wait_repaired()

        return [self.pool.submit(retry, place) for place in range(len(self.ranks))]

    def close(self) -> None:
        """End all of it."""
        for rank in self.ranks:
            rank.processor.generations.gate.leave()
        self.pool.shutdown()
