"""What the coordinator tells and takes over HTTP, as JSON."""

from __future__ import annotations

import msgspec

from rekindle.coordinator.machine.machine import Machine


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank; pid 0: it has no process now."""

    rank: int
    node: int
    pid: int
    finished: int
    status: str


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node's agent; node -1: a spare. copies: steps that it keeps of other nodes' ranks."""

    node: int
    address: str
    pid: int
    copies: dict[int, tuple[int, ...]] = {}


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """The job now. total: steps the ranks were asked for; 0: not known yet."""

    job_id: str
    state: str
    attempt: int
    generation: int
    world_size: int
    finished: int
    total: int
    ranks: list[RankView]
    nodes: list[NodeView]
    holder: str
    metrics: dict[str, float]


class Stop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person wants the job to end; by: who it is."""

    by: str


def job_view(machine: Machine, holder: str, metrics: dict[str, float]) -> JobView:
    """Describe the job as it is now."""
    ranks = [
        RankView(rank=r.rank, node=r.node, pid=r.pid, finished=r.finished, status=r.status.value)
        for r in machine.job.roster.ranks
    ]
    nodes = [
        NodeView(
            node=n.node,
            address=n.address,
            pid=n.pid,
            copies={rank: tuple(step for step, _ in kept) for rank, kept in n.copies.items()},
        )
        for n in machine.job.roster.agents()
    ]
    return JobView(
        job_id=machine.job.spec.job_id,
        state=machine.job.phase.value,
        attempt=machine.job.attempt,
        generation=machine.job.generation,
        world_size=machine.job.roster.world_size,
        finished=min(rank.finished for rank in machine.job.roster.world),
        total=machine.checkpoints.total,
        ranks=ranks,
        nodes=nodes,
        holder=holder,
        metrics=metrics,
    )
