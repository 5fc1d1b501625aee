"""Real processes for tests of several ranks. Every wait has a bound.

A test runs a function in several processes, which are forked from a server that has already
imported torch. The process of the test hosts the store, as an agent does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from repository import ROOT
from waiting import bound_s

from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.training.torch.groups.generation_group import Group

# torch resolves the names of its store's peers. Without a name server, each query takes seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.nn.parallel", "torch.optim", "msgspec", "xxhash"]
)


@contextmanager
def _tests_importable() -> Iterator[None]:
    """Let a new process import the module of the test, whose name starts at the root.

    The new process copies sys.path at its start. In this process, the root stays off sys.path.
    """
    sys.path.append(str(ROOT))
    try:
        yield
    finally:
        sys.path.pop()


class Rank:
    """The state of a rank's process: its rank, the store, and a connection to the test."""

    def __init__(self, rank: int, world_size: int, port: int, connection: Connection) -> None:
        self.rank = rank
        self.world_size = world_size
        self._connection = connection
        self.store = dist.TCPStore(
            "127.0.0.1", port, timeout=timedelta(seconds=bound_s()), wait_for_workers=False
        )

    def tell(self, message: Any) -> None:
        self._connection.send(("told", message))

    def hear(self) -> Any:
        assert self._connection.poll(bound_s()), "the test sent nothing"
        return self._connection.recv()


class Ranks:
    """The test's view of the ranks: messages to and from them, kills, and results."""

    def __init__(self, body: Callable[..., Any], world_size: int, *args: Any) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            mine, theirs = _context.Pipe()
            process = _context.Process(
                target=_main, args=(body, rank, world_size, self._store.port, theirs, args)
            )
            with _tests_importable():
                process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def tell(self, rank: int, message: Any) -> None:
        self._connections[rank].send(message)

    def hear(self, rank: int) -> Any:
        kind, message = self._next(rank)
        assert kind == "told", message
        return message

    def returned(self, rank: int) -> Any:
        kind, message = self._next(rank)
        assert kind == "returned", message
        return message

    def results(self) -> list[Any]:
        return [self.returned(rank) for rank in range(len(self._processes))]

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def kill(self, rank: int) -> None:
        os.kill(self._processes[rank].pid, signal.SIGKILL)
        self._processes[rank].join(bound_s())

    def _next(self, rank: int) -> tuple[str, Any]:
        assert self._connections[rank].poll(bound_s()), f"rank {rank} sent nothing"
        try:
            return self._connections[rank].recv()
        except EOFError:
            return "died", f"rank {rank} died"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(bound_s())
            process.close()
        for connection in self._connections:
            connection.close()


@contextmanager
def started(body: Callable[..., Any], world_size: int, *args: Any) -> Iterator[Ranks]:
    """Run `body(rank: Rank, *args)` in `world_size` processes, which end with the context."""
    ranks = Ranks(body, world_size, *args)
    try:
        yield ranks
    finally:
        ranks.close()


def run(body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Return the results of `body(rank: Rank, *args)` in `world_size` processes."""
    with started(body, world_size, *args) as ranks:
        return ranks.results()


def formed(
    rank: Rank,
    generation: int = 1,
    *,
    timeout_s: float | None = None,
    page: HeartbeatPage | None = None,
) -> Group:
    """Return the default process group of a generation with all ranks."""
    group = Group(page)
    group.form(
        store=rank.store,
        generation=generation,
        rank=rank.rank,
        world_size=rank.world_size,
        backend="gloo",
        timeout_s=bound_s() if timeout_s is None else timeout_s,
    )
    return group


def _main(
    body: Callable[..., Any],
    number: int,
    world_size: int,
    port: int,
    connection: Connection,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        rank = Rank(number, world_size, port, connection)
        outcome = ("returned", body(rank, *args))
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    connection.send(outcome)
    # A process that ends would break its peers' sockets, so the test kills it.
    connection.poll(bound_s())
