"""What agent and coordinator say of checkpoints: a part of the protocol, see `protocol`."""

from __future__ import annotations

import msgspec

from rekindle.checkpoints.manifest import FileEntry, StateOrigin
from rekindle.protocol.rank import Message
from rekindle.recovery.faults.invalid_states import Suspicion
from rekindle.recovery.policy.plan import Made

# ---- agent -> coordinator


class CheckpointWritten(Message, frozen=True, kw_only=True):
    """A checkpoint was committed, or `error` says why not. final: it answers WriteFinalCheckpoint.

    shards: pieces that it is in; more than one, and all nodes have the store in common.
    stall_s: for how many seconds training stood still for it.
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

    @property
    def lasting(self) -> bool:
        """A fact, whichever coordinator reads it."""
        return True


class SnapshotRefused(Message, frozen=True, kw_only=True):
    """A rank keeps no snapshots, because its node has no memory for them."""

    rank: int
    error: str


class ShardReady(Message, frozen=True, kw_only=True):
    """A checkpoint is due, and this node can write one shard of it. The answer is WriteShards.

    rank: whose snapshot it is. shards: how many there are.
    """

    step: int
    generation: int
    rank: int
    shard: int
    shards: int


class ShardWritten(Message, frozen=True, kw_only=True):
    """One shard of a checkpoint is in the store as `file`, or `error` says why not.

    shards: how many there are. position: of the data, as JSON. origin: what the rank said of the
    state. metrics: of the step, of this rank. stall_s: for how many seconds training stood still
    for it. final: it answers WriteFinalCheckpoint.
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
    """A checkpoint that was due is not written, for the store was busy; shards: it was to have."""

    step: int
    generation: int
    shards: int = 1
    reason: str

    @property
    def lasting(self) -> bool:
        """A fact, whichever coordinator reads it."""
        return True


class Pruned(Message, frozen=True, kw_only=True):
    """Checkpoints were removed; `error`: what could not be done, or is amiss."""

    removed: tuple[Made, ...] = ()
    error: str = ""

    @property
    def lasting(self) -> bool:
        """A fact, whichever coordinator reads it."""
        return True


class CheckpointInvalid(Message, frozen=True, kw_only=True):
    """A checkpoint newer than the one that counts is not valid."""

    path: str
    reason: str

    @property
    def lasting(self) -> bool:
        """A fact, whichever coordinator reads it."""
        return True


# ---- coordinator -> agent


class WriteFinalCheckpoint(Message, frozen=True, kw_only=True):
    """Write the snapshot of `step`, which generation `made` did, or a newer clean one.

    shards: where the state is in several, those that are to be written, of exactly this state, each
    with the rank whose snapshot (or copy of one) it is; and how many there are.
    """

    step: int
    made: int
    suspicions: tuple[Suspicion, ...] = ()
    shards: dict[int, int] = msgspec.field(default_factory=dict)
    of: int = 1


class WriteShards(Message, frozen=True, kw_only=True):
    """All shards of this checkpoint can be written: write these, each of the rank that has it.

    Answered by ShardWritten of each, or by WriteLeftOut. of: how many there are of all nodes.
    """

    step: int
    generation: int
    shards: dict[int, int]
    of: int


class Commit(Message, frozen=True, kw_only=True):
    """All shards of this checkpoint are written: make it valid; answered by CheckpointWritten."""

    step: int
    generation: int
    files: tuple[FileEntry, ...]
    position: str = "{}"
    origin: StateOrigin = StateOrigin()
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    seconds: float = 0.0
    stall_s: float = 0.0
    final: bool = False
