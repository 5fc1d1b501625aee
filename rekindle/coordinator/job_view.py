"""The job as it is now, for people and flows."""

from __future__ import annotations

from rekindle.coordinator.machine.machine import Machine
from rekindle.protocol.http_views import JobView, NodeView, RankView


def job_view(machine: Machine, holder: str) -> JobView:
    """Describe the job as it is now. holder: who steers it."""
    job = machine.job
    ranks = [
        RankView(rank=r.rank, node=r.node, pid=r.pid, finished=r.finished, status=r.status.value)
        for r in job.roster.ranks
    ]
    nodes = [
        NodeView(
            node=n.node,
            address=n.address,
            pid=n.pid,
            copies={rank: tuple(step for step, _ in kept) for rank, kept in n.copies.items()},
        )
        for n in job.roster.agents()
    ]
    return JobView(
        job_id=job.spec.job_id,
        state=job.phase.value,
        attempt=job.attempt,
        generation=job.generation,
        world_size=job.roster.world_size,
        finished=min(rank.finished for rank in job.roster.world),
        total=machine.checkpoints.total,
        ranks=ranks,
        nodes=nodes,
        holder=holder,
        metrics=machine.checkpoints.metrics,
    )
