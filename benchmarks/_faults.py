"""Faults, and what a Rekindle job says of them: its journal and its coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from _jobs import HOME, JOB_ID, Job

from rekindle.engines.client import JobClient
from rekindle.names import SPARE
from rekindle.recovery import journal
from rekindle.recovery.journal import Incident
from rekindle.runtime.protocol import Inject, InjectionKind
from rekindle.runtime.spec import JobDirectory
from rekindle.runtime.state import Phase
from rekindle.runtime.view import JobView, NodeView

LIMIT_S = 60.0
_LOOK_S = 0.1


@dataclass(frozen=True)
class Struck:
    """A fault: what it was, which rank (or the first of which node) it hit, and when.

    killed: the ranks whose processes it ended.
    """

    what: str
    rank: int
    at: float
    killed: frozenset[int] = frozenset()


def kill_rank(job: Job, rank: int) -> Struck:
    """Send SIGKILL to a rank, of Rekindle or of torchrun."""
    process = psutil.Process(job.pid(rank))
    at = time.time()
    process.kill()
    return Struck(f"rank {rank} killed", rank, at, frozenset({rank}))


def lose_node(job: Job, node: int) -> Struck:
    """Send SIGKILL to a node's agent, with which its ranks end, once a spare is ready for it."""
    wait_spare(job)
    process = psutil.Process(_agents(job, node)[0].pid)
    ranks = frozenset(rank.rank for rank in _status(job).ranks if rank.node == node)
    at = time.time()
    process.kill()
    return Struck(f"node {node} lost", min(ranks), at, ranks)


def inject(job: Job, rank: int, kind: InjectionKind) -> Struck:
    """Have a rank raise an error in its next step; it strikes as the step's body begins."""
    since = time.time()
    _client(job).inject(Inject(rank=rank, kind=kind))
    left = job.wait_all("left", since=since, ranks={rank}, limit_s=LIMIT_S)
    if left is None:
        raise SystemExit(f"rank {rank} did not leave its step:\n{job.output()}")
    own = (line for line in reversed(job.lines) if line.rank == rank and line.event == "begin")
    at = next(line.at for line in own if line.at <= left[rank].at)
    return Struck(f"{kind.value} in rank {rank}", rank, at)


def wait_training(job: Job) -> None:
    """Wait until all ranks train, so that an earlier fault is over."""
    _wait(lambda: _status(job).state == Phase.TRAINING.value, "the ranks did not train", job)


def wait_spare(job: Job) -> None:
    """Wait until a spare has imported torch: it has a process in reserve beside its zygote then."""
    _wait(lambda: any(_children(n.pid) > 1 for n in _agents(job, SPARE)), "no spare came", job)


def incidents(job: Job) -> list[Incident]:
    """The job's incidents so far, from its journal."""
    lines = _directory(job).ledger.read_bytes().splitlines()
    return journal.incidents(journal.read(lines))


def _agents(job: Job, node: int) -> list[NodeView]:
    return [agent for agent in _status(job).nodes if agent.node == node]


def _children(pid: int) -> int:
    return len(psutil.Process(pid).children())


def _status(job: Job) -> JobView:
    return _client(job).status()


def _client(job: Job) -> JobClient:
    directory = _directory(job)
    endpoint = directory.endpoint()
    assert endpoint is not None  # it trains, so it was launched
    return JobClient(endpoint, directory.secret())


def _directory(job: Job) -> JobDirectory:
    return JobDirectory(job.folder / HOME / "jobs" / JOB_ID)


def _wait(true: Callable[[], bool], otherwise: str, job: Job) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"{otherwise} within {LIMIT_S:.0f} s:\n{job.output()}")
        time.sleep(_LOOK_S)
