"""Cause faults, and read a Rekindle job's records of them: its journal and its coordinator."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
from _jobs import HOME, JOB_ID, Job

from rekindle.coordinator.machine.job_state import Phase
from rekindle.job.spec import job_directory
from rekindle.names import SPARE
from rekindle.protocol.agent import InjectionKind
from rekindle.protocol.http_views import NodeView
from rekindle.recovery.journal.journal import Incident
from rekindle.testing.handle import JobHandle

LIMIT_S = 60.0


@dataclass(frozen=True)
class Struck:
    """A fault: its name, the rank (or a node's first rank) that it hit, and its time.

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
    """Send SIGKILL to a node's agent once a spare is ready for it; its ranks end with the agent."""
    wait_spare(job)
    process = psutil.Process(_agents(job, node)[0].pid)
    ranks = frozenset(rank.rank for rank in handle(job).status().ranks if rank.node == node)
    at = time.time()
    process.kill()
    return Struck(f"node {node} lost", min(ranks), at, ranks)


def inject(job: Job, rank: int, kind: InjectionKind) -> Struck:
    """Make a rank raise an error in its next step, at the beginning of the step's body."""
    since = time.time()
    handle(job).inject(kind, rank=rank)
    left = job.wait_all("left", since=since, ranks={rank}, limit_s=LIMIT_S)
    if left is None:
        raise SystemExit(f"rank {rank} did not leave its step:\n{job.output()}")
    own = (line for line in reversed(job.lines) if line.rank == rank and line.event == "begin")
    at = next(line.at for line in own if line.at <= left[rank].at)
    return Struck(f"{kind.value} in rank {rank}", rank, at)


def wait_training(job: Job) -> None:
    """Wait until all ranks train: an earlier fault is then over."""
    run = handle(job)
    run.wait_until(lambda: run.status().state == Phase.TRAINING.value, "the training of all ranks")


def wait_spare(job: Job) -> None:
    """Wait until a spare has imported torch. Then its fork server has a process in reserve."""
    handle(job).wait_until(
        lambda: any(_children(spare.pid) > 1 for spare in _agents(job, SPARE)), "a ready spare"
    )


def incidents(job: Job) -> list[Incident]:
    """Return the job's incidents so far, from its journal."""
    return handle(job).incidents()


def handle(job: Job) -> JobHandle:
    """Return the handle of a Rekindle job."""
    return JobHandle(job_directory(JOB_ID, at=job.folder / HOME), limit_s=LIMIT_S)


def _agents(job: Job, node: int) -> list[NodeView]:
    return [agent for agent in handle(job).status().nodes if agent.node == node]


def _children(pid: int) -> int:
    return len(psutil.Process(pid).children())
