"""The kinds of jobs in the campaign, and the faults that each of them can have."""

from __future__ import annotations

import dataclasses

from campaign.faults import Moment, Victim

STEPS = 40
SNAPSHOT_EVERY = 5


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of job.

    `variant`: of the training script.
    `ranks`: on each node.
    `min_nodes`: fewest nodes that may train. 0: all.
    `checkpoint_every`: steps between two checkpoints. 0: none.
    `copies`: whether each rank's state is also in a rank of another node, or of the only node.
    `s3`: whether the checkpoints are in an S3 store.
    `flow`: whether a flow run launches the job instead of `rekindle run`.
    `recovers`: whether the policy allows a recovery. If not, the job fails with its first fault.
    """

    name: str
    variant: str = "ddp"
    nodes: int = 1
    ranks: int = 2
    spares: int = 0
    min_nodes: int = 0
    checkpoint_every: int = 0
    copies: bool = True
    s3: bool = False
    flow: bool = False
    recovers: bool = True

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks

    def victims(self) -> tuple[Victim, ...]:
        """Return the processes of such a job."""
        found = [Victim.RANK]
        if not self.recovers:
            return (*found, Victim.LAUNCHER, Victim.FORK_SERVER)
        found += [Victim.FORK_SERVER, Victim.STORE, Victim.AGENT, Victim.COORDINATOR]
        found += [Victim.FLOW if self.flow else Victim.LAUNCHER]
        found += [Victim.WORKER] * has_workers(self)
        found += [Victim.SPARE] * bool(self.spares)
        return tuple(found)

    def moments(self, victim: Victim) -> tuple[Moment, ...]:
        """Return the moments at which this process can meet a fault."""
        found = [Moment.TRAINING, Moment.END]
        if victim is not Victim.WORKER:  # it exists from the first step on
            found += [Moment.LAUNCH, Moment.START]
        found += [Moment.RECOVERY] * self.recovers
        found += [Moment.CHECKPOINT] * bool(self.checkpoint_every)
        return tuple(found)


def has_workers(kind: Kind) -> bool:
    """Return whether the ranks have DataLoader workers."""
    return kind.variant.startswith(("map", "kept", "stream"))


KINDS = (
    Kind("ddp on one node"),
    Kind("ddp on two nodes", nodes=2, ranks=1),
    Kind("checkpoints", nodes=2, ranks=1, checkpoint_every=4),
    Kind("spares", nodes=2, ranks=1, spares=1),
    Kind("hsdp", "hsdp", nodes=2, ranks=2),
    Kind("fsdp", "fsdp", nodes=2, ranks=1, checkpoint_every=5, copies=False),
    Kind("elastic", nodes=2, ranks=1, min_nodes=1),
    Kind("s3", checkpoint_every=4, s3=True),
    Kind("loader", "map-2"),
    Kind("stream", "stream-2", nodes=2, ranks=1, checkpoint_every=5),
    Kind("no recovery", recovers=False),
    Kind("flow", nodes=2, ranks=1, checkpoint_every=5, flow=True),
)
