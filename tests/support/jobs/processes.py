"""Simulated agents and processes: their state and their messages."""

from __future__ import annotations

import enum
from collections import deque

from rekindle.protocol import agent as p

# An agent keeps these messages for the next coordinator. The others concern a generation of the old
# one.
LASTING = (p.Exited, p.Snapshots, p.CheckpointWritten)


class Doing(enum.Enum):
    """The activity of a simulated process."""

    STARTING = "runs towards its Session"
    WAITING = "has arrived"
    RESTORING = "takes its state"
    STEPPING = "does steps"
    BROKEN = "its collective failed, it waits to be told why"
    DISMISSED = "runs what comes after its Session"
    STUCK = "does nothing any more"


class Process:
    """The process of a rank. It behaves as `Session` does."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.doing = Doing.STARTING
        self.generation = 0
        self.over = 0
        self.hold = 0
        self.finished = 0
        self.has_state = False
        self.state_generation = 0
        self.told_step = False
        self.form: p.FormGeneration | None = None

    def arrived(self, total: int) -> p.Arrived:
        self.doing = Doing.WAITING
        return p.Arrived(
            rank=self.rank,
            generation=self.generation,
            state_generation=self.state_generation,
            finished=self.finished if self.has_state else None,
            done=self.has_state and self.finished >= total,
        )


class Agent:
    """The agent of a node, with unread orders and unsent messages.

    `cut`: its coordinator failed, and it has not found another one. It keeps its lasting messages.
    """

    def __init__(self) -> None:
        self.orders: deque[p.Message] = deque()
        self.news: deque[p.Message] = deque()
        self.ranks: dict[int, Process] = {}
        self.cut = False
        self.generation = 0
        self.restart = 0
        self.training: set[int] = set()
        self.waiting: dict[int, p.Arrived] = {}
        self.ended: set[int] = set()
        self.snapshots: dict[int, tuple[tuple[int, int], ...]] = {}
        self.store: p.LiveStore | None = None

    def lose_coordinator(self) -> None:
        self.cut = True
        self.news = deque(message for message in self.news if isinstance(message, LASTING))

    def find_coordinator(self) -> dict[str, object]:
        """Return the fields of its Hello to a new coordinator, and queue the next messages."""
        self.cut = False
        self.orders.clear()
        pids = {rank: process.pid for rank, process in self.ranks.items()}
        pids |= {news.rank: news.pid for news in self.news if isinstance(news, p.Exited)}
        self.news.extend(self.waiting.values())
        return {
            "snapshots": dict(self.snapshots),
            "generation": self.generation,
            "restart": self.restart,
            "ranks": tuple(
                p.LiveRank(rank=rank, pid=pid, training=rank in self.training)
                for rank, pid in sorted(pids.items())
            ),
            "ended": tuple(sorted(self.ended - set(pids))),
            "store": self.store,
        }
