"""The part of the protocol about checkpoints, between agent and coordinator."""

from __future__ import annotations

import msgspec

from rekindle.checkpoints.manifest import FileEntry, StateOrigin
from rekindle.protocol.rank import Message
from rekindle.states import StateId, Suspicion

# ---- agent -> coordinator


class CheckpointWritten(Message, frozen=True, kw_only=True):
    """The agent committed a checkpoint; `error`: why not. final: it answers WriteFinalCheckpoint.

    shards: the number of shards; if more than one, all nodes share the store.
    stall_s: the seconds that training stood still for it.
    """

    step: int
    generation: int
    path: str = ""
    bytes: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0
    shards: int = 1
    final: bool = False
    error: str = ""

    lasting = True


class SnapshotRefused(Message, frozen=True, kw_only=True):
    """A rank keeps no snapshots, because its node has no memory for them."""

    rank: int
    error: str


class ShardReady(Message, frozen=True, kw_only=True):
    """A checkpoint is due, and this node can write one shard of it. The answer is WriteShards.

    rank: the rank of the snapshot. shards: the number of all shards.
    """

    step: int
    generation: int
    rank: int
    shard: int
    shards: int


class ShardWritten(Message, frozen=True, kw_only=True):
    """One shard of a checkpoint is in the store as `file`; `error`: why it failed.

    shards: the number of all shards. position: of the data, as JSON. origin: the origin of the
    state, from the rank. metrics: of this rank, for the step.

    stall_s: the seconds that training stood still for it. final: it answers WriteFinalCheckpoint.
    """

    step: int
    generation: int
    shard: int
    shards: int
    file: FileEntry | None = None
    position: str = "{}"
    origin: StateOrigin = StateOrigin()
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    seconds: float = 0.0
    stall_s: float = 0.0
    final: bool = False
    error: str = ""


class WriteLeftOut(Message, frozen=True, kw_only=True):
    """The agent skips a due checkpoint, for this reason. shards: the number of its shards."""

    step: int
    generation: int
    shards: int = 1
    reason: str

    lasting = True


class Pruned(Message, frozen=True, kw_only=True):
    """The agent removed checkpoints; `error`: a failure, or a defect that it found."""

    removed: tuple[StateId, ...] = ()
    error: str = ""

    lasting = True


class CheckpointInvalid(Message, frozen=True, kw_only=True):
    """A checkpoint newer than the one that counts is invalid."""

    path: str
    reason: str

    lasting = True


# ---- coordinator -> agent


class WriteFinalCheckpoint(Message, frozen=True, kw_only=True):
    """Write the snapshot of `step` that this generation did, or a newer clean one.

    shards: for a sharded state, the shards that the agent writes, of exactly this state. Each has
    the rank whose snapshot (or copy of a snapshot) it is. of: the number of all shards.
    """

    step: int
    generation: int
    suspicions: tuple[Suspicion, ...] = ()
    shards: dict[int, int] = msgspec.field(default_factory=dict)
    of: int = 1


class WriteShards(Message, frozen=True, kw_only=True):
    """All shards of this checkpoint are ready: write these shards, each from the rank given for it.

    The agent answers with ShardWritten for each, or with WriteLeftOut. of: the number of all
    shards, on all nodes.
    """

    step: int
    generation: int
    shards: dict[int, int]
    of: int


class Commit(Message, frozen=True, kw_only=True):
    """All shards of this checkpoint are in the store: make it valid. Answer: CheckpointWritten."""

    step: int
    generation: int
    files: tuple[FileEntry, ...]
    position: str = "{}"
    origin: StateOrigin = StateOrigin()
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    seconds: float = 0.0
    stall_s: float = 0.0
    final: bool = False
