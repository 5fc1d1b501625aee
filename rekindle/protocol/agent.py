"""The messages between coordinator, agents and ranks, each with its own type.

Agent and coordinator exchange msgpack over a websocket. Agent and rank exchange msgpack over a
SEQPACKET unix socket. A receiver refuses a message with an older `attempt` or `generation`.
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
from rekindle.protocol.heartbeat_page import StateDigest
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
    Cause,
    Decoder,
    EndSession,
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
    StepLeftOut,
    ToRank,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from rekindle.recovery.faults.fault import ErrorRecord, Exit
from rekindle.states import StateId

__all__ = [  # also the messages of other modules, because this module is the whole protocol
    "Arrived",
    "BufferGrant",
    "BufferRequest",
    "Cause",
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
    "EndSession",
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
    "StepLeftOut",
    "StepTimings",
    "ToRank",
    "WriteFinalCheckpoint",
    "WriteLeftOut",
    "WriteShards",
    "decode_from_rank",
    "decode_to_rank",
    "encode",
]

CheckOrder = (CheckAlone, CheckPair, CheckStop, CheckOver)

# ---- agent -> coordinator


class LiveRank(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a rank. training: it is in a Session. A new coordinator needs this fact."""

    rank: int
    pid: int
    training: bool = False


class LiveStore(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks' store (or scheduler) on an agent. serial: that of the HostStore order."""

    serial: int
    port: int


class Hello(Message, frozen=True, kw_only=True):
    """The first message of an agent on each connection. node: the requested node rank, -1: any.

    spare: the agent waits to replace a lost node. It also becomes a spare if its node is taken.
    After a promotion the agent sends Hello again, as that node.

    prepared: the agent has started the ranks of `node`, which still has another agent. The agent
    stays a spare until its promotion.

    checkpoints: those in the store of the node. The rank that loads one verifies it.

    copies: the snapshots of other nodes' ranks that the agent keeps. replica_port: their port.

    shards: the shard of the state that each rank has, if the ranks have different ones.

    host: the machine's name, which stays the same in all jobs. devices: it has accelerators.
    session: the script imports Rekindle, so its ranks probably have a Session.

    restart: the newest restart whose ranks the agent has started.
    unable: why the agent cannot work as a node.

    The message gives a new coordinator the knowledge of a dead one: the newest generation, the
    live ranks, the ranks that ended well, and the ranks' store of this node. The live ranks
    include those whose end the agent has not reported yet.
    """

    job_id: str
    attempt: int
    version: int
    node: int
    address: str
    pid: int
    processes: int
    spare: bool = False
    prepared: bool = False
    checkpoints: tuple[StateId, ...] = ()
    snapshots: dict[int, tuple[StateId, ...]] = msgspec.field(default_factory=dict)
    shards: dict[int, int] = msgspec.field(default_factory=dict)
    copies: dict[int, tuple[StateId, ...]] = msgspec.field(default_factory=dict)
    replica_port: int = 0
    host: str = ""
    devices: bool = False
    session: bool = False
    unable: str = ""
    generation: int = 0
    restart: int = 0
    ranks: tuple[LiveRank, ...] = ()
    ended: tuple[int, ...] = ()
    store: LiveStore | None = None

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks about which the sender reports."""
        return tuple(each.rank for each in self.ranks)


class Spawned(Message, frozen=True, kw_only=True):
    """The agent has started these ranks; they have not run a line of the script yet."""

    ranks: tuple[LiveRank, ...]
    generation: int

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks about which the sender reports."""
        return tuple(each.rank for each in self.ranks)


class Exited(Message, frozen=True, kw_only=True):
    """The process of a rank ended. finished: of its heartbeat page. said: the end of its output.

    no_memory: the kernel killed a process for lack of memory. digests: of states not sent before.
    """

    rank: int
    pid: int
    exit: Exit
    finished: int
    error: ErrorRecord | None = None
    no_memory: bool = False
    at: float = 0.0
    digests: tuple[StateDigest, ...] = ()
    said: str = ""

    lasting = True


class SpawnFailed(Message, frozen=True, kw_only=True):
    """The agent could not start a rank at all."""

    rank: int
    error: str


class DeviceResetFailed(Message, frozen=True, kw_only=True):
    """The agent could not reset a rank's device. Not tried: it starts the rank nevertheless."""

    rank: int
    error: str
    tried: bool = True


class StoreUp(Message, frozen=True, kw_only=True):
    """The store that HostStore orders listens. Port 0: it could not start, for reason `error`."""

    serial: int
    port: int
    error: str = ""


class StoreDown(Message, frozen=True, kw_only=True):
    """The store's process ended; ranks that are in a generation do not notice."""

    serial: int


class Snapshots(Message, frozen=True, kw_only=True):
    """The intact snapshots on this node. copies: they belong to ranks of other nodes."""

    kept: dict[int, tuple[StateId, ...]]
    copies: bool = False

    @property
    def lasting(self) -> bool:
        """Whether these are snapshots of the node's own ranks; `Hello` repeats the copies."""
        return not self.copies

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The node's own ranks."""
        return () if self.copies else tuple(self.kept)


class Heartbeat(Message, frozen=True, kw_only=True):
    """The progress of the node's ranks, and the newest metrics of its first rank.

    finished: the steps of each rank that has its generation's state. digests: the new ones of each
    rank's states.
    """

    finished: dict[int, int]
    total: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    digests: dict[int, tuple[StateDigest, ...]] = msgspec.field(default_factory=dict)

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks about which the sender reports."""
        return tuple({*self.finished, *self.digests})


# ---- coordinator -> agent


class Welcome(Message, frozen=True, kw_only=True):
    """The coordinator admits the agent as this node; SPARE: as a spare."""

    node: int


class Promote(Message, frozen=True, kw_only=True):
    """The coordinator needs a spare as this node: the spare sends Hello as that node."""

    node: int


class Spawn(Message, frozen=True, kw_only=True):
    """Start these ranks; they arrive for `generation`.

    world_size, first: the world size that the ranks see, and the number in it of the node's first
    rank. The world of the generation may be another one.

    reset: the ranks whose device the agent resets first. placements: how often a host filled the
    node's place so far. joins_running_ranks: other ranks continue in their processes, and have the
    state that the new ranks take.
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
    joins_running_ranks: bool = False


class Prepare(Message, frozen=True, kw_only=True):
    """The coordinator plans to move `node` to this spare: start the node's ranks now.

    The ranks wait at their Session. After a promotion to this node they join the others.
    """

    node: int
    spawn: Spawn


class HostStore(Message, frozen=True, kw_only=True):
    """Start a store for the ranks; the agent first ends its earlier store."""

    serial: int
    port: int


class StatesEqual(Message, frozen=True, kw_only=True):
    """All ranks held the same state after this step: keep a snapshot that is not newer."""

    step: int


class Kill(Message, frozen=True, kw_only=True):
    """End these ranks: SIGTERM, then SIGKILL after `grace_s` (0: SIGKILL at once).

    last: the job ends, so they do not start again.
    """

    ranks: tuple[int, ...]
    grace_s: float = 0.0
    last: bool = False


class EndAgent(Message, frozen=True, kw_only=True):
    """The agent ends its ranks, and exits with this status.

    at_once: it does not wait for a checkpoint that it is writing. refused: the reason why the
    coordinator does not accept the agent; empty: the job has ended for it.
    """

    status: int
    at_once: bool = False
    refused: str = ""


class Approval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person's answer (JSON) to an incident whose strategy waits for approval. by: the person.

    about: the time of the fault that the person has read about; 0: the fault that waits now. It
    may be a later one: another person may have answered the first question.
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
    | StepLeftOut
)
ToAgent = (
    Welcome
    | Promote
    | Spawn
    | Prepare
    | HostStore
    | Kill
    | StatesEqual
    | CheckAlone
    | CheckPair
    | CheckStop
    | CheckOver
    | WriteFinalCheckpoint
    | WriteShards
    | Commit
    | Settings
    | EndAgent
    | InspectRanks
    | GenerationEnded
    | PauseRequest
    | FormGeneration
    | EndSession
    | Inject
)

decode_from_agent = Decoder(FromAgent, "an agent")
decode_to_agent = Decoder(ToAgent, "a coordinator")
