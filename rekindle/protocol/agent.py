"""What coordinator, agents and ranks may say to each other: one typed message each.

Agent and coordinator speak msgpack over a websocket; agent and rank speak it over a unix socket of
the SEQPACKET kind, which keeps message borders. `attempt` and `generation` are the fences: a
message that bears an older one is refused.
"""

from __future__ import annotations

import msgspec

from rekindle.protocol.checkpoint import (
    CheckpointInvalid,
    CheckpointWritten,
    Commit,
    Pruned,
    ShardReady,
    ShardWritten,
    SnapshotRefused,
    WriteFinalCheckpoint,
    WriteLeftOut,
    WriteShards,
)
from rekindle.protocol.monitoring import (
    Conditions,
    InspectRanks,
    ProfilingSwitchRead,
    RankInspection,
    RanksInspected,
    RankStalled,
    StepTimings,
)
from rekindle.protocol.node_check import (
    CheckAlone,
    Checked,
    CheckOver,
    CheckPair,
    CheckReady,
    CheckStop,
)
from rekindle.protocol.rank import (
    Arrived,
    BufferGrant,
    BufferRequest,
    Dismiss,
    FormGeneration,
    FromRank,
    GenerationEnded,
    Inject,
    InjectionKind,
    Message,
    Paused,
    PauseRequest,
    Profile,
    ReplicaAddress,
    Settings,
    SnapshotTaken,
    StateReady,
    StepDone,
    StepFailed,
    ToRank,
)
from rekindle.recovery.faults.fault import ErrorRecord, Exit
from rekindle.recovery.policy.plan import Made

__all__ = [  # what is said elsewhere too, for this is the whole protocol
    "Arrived",
    "BufferGrant",
    "BufferRequest",
    "CheckAlone",
    "CheckOver",
    "CheckPair",
    "CheckReady",
    "CheckStop",
    "Checked",
    "CheckpointInvalid",
    "CheckpointWritten",
    "Commit",
    "Conditions",
    "Dismiss",
    "FormGeneration",
    "FromRank",
    "GenerationEnded",
    "Inject",
    "InjectionKind",
    "InspectRanks",
    "Message",
    "PauseRequest",
    "Paused",
    "Profile",
    "ProfilingSwitchRead",
    "Pruned",
    "RankInspection",
    "RankStalled",
    "RanksInspected",
    "ReplicaAddress",
    "Settings",
    "ShardReady",
    "ShardWritten",
    "SnapshotRefused",
    "SnapshotTaken",
    "StateReady",
    "StepDone",
    "StepFailed",
    "StepTimings",
    "ToRank",
    "WriteFinalCheckpoint",
    "WriteLeftOut",
    "WriteShards",
]

# ---- agent -> coordinator


class LiveRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process. training: it is in a Session (which is told to a coordinator it joins)."""

    rank: int
    pid: int
    training: bool = False


class LiveStore(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks' store (or scheduler) that an agent hosts. serial: of the order to host it."""

    serial: int
    port: int


class Hello(Message, frozen=True, kw_only=True):
    """The first message of an agent on each line. node: the node rank it wants, -1: any.

    spare: it waits to take a lost node's place, and does so too if the node it wants is taken. When
    it is promoted it says hello again, as that node.

    checkpoints: those that its node finds; whoever loads one proves it.
    copies: the snapshots of other nodes' ranks that it keeps; replica_port: the port where.
    shards: which piece of the state ranks have, where not all have the same.
    host: the machine's name, which it keeps from job to job. devices: it has accelerators.
    restart: the newest one that it has started ranks for. unable: why it cannot work as a node.

    To a new coordinator that takes a dead one's place it tells what the dead one knew: the newest
    generation, the ranks that live (or whose end it has yet to tell), those that ended well, and
    the ranks' store, if it listens on this node.
    """

    job_id: str
    attempt: int
    version: int
    node: int
    address: str
    pid: int
    processes: int
    spare: bool = False
    checkpoints: tuple[Made, ...] = ()
    snapshots: dict[int, tuple[Made, ...]] = msgspec.field(default_factory=dict)
    shards: dict[int, int] = msgspec.field(default_factory=dict)
    copies: dict[int, tuple[Made, ...]] = msgspec.field(default_factory=dict)
    replica_port: int = 0
    host: str = ""
    devices: bool = False
    unable: str = ""
    generation: int = 0
    restart: int = 0
    ranks: tuple[LiveRank, ...] = ()
    ended: tuple[int, ...] = ()
    store: LiveStore | None = None

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks that the sender speaks for."""
        return tuple(each.rank for each in self.ranks)


class Spawned(Message, frozen=True, kw_only=True):
    """These ranks were started; they have not run a line of the script yet."""

    ranks: tuple[LiveRank, ...]
    generation: int

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks that the sender speaks for."""
        return tuple(each.rank for each in self.ranks)


class Exited(Message, frozen=True, kw_only=True):
    """A rank's process ended. finished: as its heartbeat page said.

    no_memory: the kernel has killed a process of this node for want of memory.
    """

    rank: int
    pid: int
    exit: Exit
    finished: int
    error: ErrorRecord | None = None
    no_memory: bool = False
    at: float = 0.0

    @property
    def lasting(self) -> bool:
        """A fact, whichever coordinator reads it."""
        return True


class SpawnFailed(Message, frozen=True, kw_only=True):
    """A rank could not be started at all."""

    rank: int
    error: str


class DeviceResetFailed(Message, frozen=True, kw_only=True):
    """A rank was not started, for its device could not be reset."""

    rank: int
    error: str


class StoreUp(Message, frozen=True, kw_only=True):
    """The store asked for by HostStore listens; port 0 and `error`: it could not."""

    serial: int
    port: int
    error: str = ""


class StoreDown(Message, frozen=True, kw_only=True):
    """The store's process ended; ranks that are in a generation do not notice."""

    serial: int


class Snapshots(Message, frozen=True, kw_only=True):
    """The intact snapshots on this node. copies: they are those of other nodes' ranks."""

    kept: dict[int, tuple[Made, ...]]
    copies: bool = False

    @property
    def lasting(self) -> bool:
        """Its own ranks' snapshots are; `Hello` has the copies."""
        return not self.copies

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The node's own ranks."""
        return () if self.copies else tuple(self.kept)


class Heartbeat(Message, frozen=True, kw_only=True):
    """Steps finished by each rank of the node, and the newest metrics of its first one."""

    finished: dict[int, int]
    total: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks that the sender speaks for."""
        return tuple(self.finished)


# ---- coordinator -> agent


class Welcome(Message, frozen=True, kw_only=True):
    """The agent is taken in as this node; SPARE: as a spare."""

    node: int


class Promote(Message, frozen=True, kw_only=True):
    """A spare is wanted as this node: it says hello as such."""

    node: int


class Spawn(Message, frozen=True, kw_only=True):
    """Start these ranks; they arrive for `generation`.

    world_size, first: what they are told of their world, and of the place in it of the node's first
    rank; the generation that they arrive for may be another one. reset: those of the ranks whose
    device is to be reset first. placements: how often the node's place was filled so far. joins:
    others go on in their processes, and have the state that these take.
    """

    generation: int
    restart: int
    ranks: tuple[int, ...]
    world_size: int
    first: int
    store_host: str
    store_port: int
    reset: tuple[int, ...] = ()
    placements: int = 1
    joins: bool = False


class HostStore(Message, frozen=True, kw_only=True):
    """Start a store for the ranks; an earlier one of this agent is ended."""

    serial: int
    port: int


class Kill(Message, frozen=True, kw_only=True):
    """End these ranks: SIGTERM, then SIGKILL after `grace_s` (0: SIGKILL at once)."""

    ranks: tuple[int, ...]
    grace_s: float = 0.0


class Bye(Message, frozen=True, kw_only=True):
    """The agent ends its ranks, and itself with this status.

    at_once: it does not wait for a checkpoint that is being written. refused: the reason why the
    coordinator does not accept the agent; empty: the job has ended for it.
    """

    status: int
    at_once: bool = False
    refused: str = ""


# ---- people -> coordinator, as JSON


class Approval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person's answer to an incident whose strategy waits for it; by: who it is.

    about: when the fault was seen that the person has read of; 0: whichever waits now. A question
    that was answered elsewhere meanwhile may have been followed by another one.
    """

    incident: int
    granted: bool
    by: str
    about: float = 0.0


FromAgent = (
    Hello
    | Spawned
    | Exited
    | SpawnFailed
    | DeviceResetFailed
    | StoreUp
    | StoreDown
    | Snapshots
    | CheckpointWritten
    | ShardReady
    | ShardWritten
    | WriteLeftOut
    | SnapshotRefused
    | Pruned
    | CheckpointInvalid
    | Heartbeat
    | CheckReady
    | Checked
    | RankStalled
    | RanksInspected
    | StepTimings
    | ProfilingSwitchRead
    | Conditions
    | Arrived
    | StepFailed
    | Paused
    | StateReady
    | StepDone
)
ToAgent = (
    Welcome
    | Promote
    | Spawn
    | HostStore
    | Kill
    | CheckAlone
    | CheckPair
    | CheckStop
    | CheckOver
    | WriteFinalCheckpoint
    | WriteShards
    | Commit
    | Settings
    | Bye
    | InspectRanks
    | GenerationEnded
    | PauseRequest
    | FormGeneration
    | Dismiss
    | Inject
)


CheckOrder = (CheckAlone, CheckPair, CheckStop, CheckOver)
