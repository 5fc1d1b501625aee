"""What coordinator, agents and ranks may say to each other: one typed message each.

Agent and coordinator speak msgpack over a websocket; agent and rank speak it over a unix socket of
the SEQPACKET kind, which keeps message borders. `attempt` and `generation` are the fences: a
message that bears an older one is refused.
"""

from __future__ import annotations

import enum

import msgspec

from rekindle.recovery.fault import ErrorRecord, Exit, Kind
from rekindle.recovery.plan import RankPlan


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


# ---- rank -> agent


class Arrived(Message, frozen=True, kw_only=True, tag="arrived"):
    """The rank waits for a generation: at the start of its Session, or after leaving a step.

    finished: steps it has finished, None: its state was just built by the script.
    torn: its state is of no step, for it was interrupted while that was changed.
    done: it has finished all the steps it was asked for.
    passed: steps after which all ranks were let go before, where the script asked for more later.
    """

    rank: int
    generation: int
    finished: int | None = None
    torn: bool = False
    done: bool = False
    passed: int = 0


class StepFailed(Message, frozen=True, kw_only=True, tag="step-failed"):
    """A step of this generation raised what is no error of the script; the rank waits for orders.

    kind: LINK, a collective failed, most likely because a peer did; TRANSIENT; DEVICE_MEMORY; or,
    said after a repair was tried, DEVICE: this process cannot go on. finished: steps, before it.
    """

    rank: int
    generation: int
    kind: Kind
    error: str
    finished: int


class Held(Message, frozen=True, kw_only=True, tag="held"):
    """The rank stands between two steps and begins no other: it answers Hold."""

    rank: int
    generation: int


class StateReady(Message, frozen=True, kw_only=True, tag="state-ready"):
    """The rank has the state that the plan named; `error` says why not."""

    rank: int
    generation: int
    error: str = ""


class StepDone(Message, frozen=True, kw_only=True, tag="step-done"):
    """The rank has finished its first step of this generation."""

    rank: int
    generation: int
    finished: int


class SnapshotRoom(Message, frozen=True, kw_only=True, tag="snapshot-room"):
    """The rank asks its agent for two buffers of this size; answered by SnapshotBuffers.

    bytes 0: it asks for the buffers that exist, to read them.
    """

    rank: int
    bytes: int


class SnapshotTaken(Message, frozen=True, kw_only=True, tag="snapshot-taken"):
    """The rank has filled a buffer; `checkpoint`: the agent writes it to the store as well."""

    rank: int
    generation: int
    step: int
    buffer: int
    checkpoint: bool = False


# ---- agent -> rank


class Over(Message, frozen=True, kw_only=True, tag="over"):
    """Generation `generation` is over: leave your collective and arrive for the next."""

    generation: int


class Hold(Message, frozen=True, kw_only=True, tag="hold"):
    """Stop before the next step, say so, and wait for the end of this generation.

    The world is about to grow. While one rank holds, no other can be in a collective but in that of
    the next step, so that nothing else is broken off when the generation ends.
    """

    rank: int
    generation: int


class Form(Message, frozen=True, kw_only=True, tag="form"):
    """Form this generation at the named store, with state as planned, and go on from `step`.

    ranks: what each rank of the receiving node is in this world; elsewhere a rank is called by its
    number in the full one. plan: what each of them does, with peers by their number in this
    world. An agent passes on only the rank's own of both.
    """

    generation: int
    world_size: int
    store_host: str
    store_port: int
    step: int
    passed: int = 0
    ranks: dict[int, int]
    plan: dict[int, RankPlan]


class SnapshotBuffers(Message, frozen=True, kw_only=True, tag="snapshot-buffers"):
    """Two memory files come with this message, if `error` is empty."""

    error: str = ""


class Dismiss(Message, frozen=True, kw_only=True, tag="dismiss"):
    """All ranks have finished all steps: the Session may end."""

    finished: int


# ---- agent -> coordinator


class LiveRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process. training: it is in a Session (which is told to a coordinator it joins)."""

    rank: int
    pid: int
    training: bool = False


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The first message of an agent on each line. node: the node rank it wants, -1: any.

    spare: it waits to take a lost node's place, and does so too if the node it wants is taken. When
    it is promoted it says hello again, as that node.

    checkpoints: steps of those that its node finds; whoever loads one proves it.
    restart: the newest one that it has started ranks for.

    To a new coordinator that takes a dead one's place it tells what the dead one knew: the newest
    generation, the ranks that live (or whose end it has yet to tell), and those that ended well.
    """

    job_id: str
    attempt: int
    version: int
    node: int
    address: str
    pid: int
    processes: int
    spare: bool = False
    checkpoints: tuple[int, ...] = ()
    snapshots: dict[int, tuple[int, ...]] = {}
    generation: int = 0
    restart: int = 0
    ranks: tuple[LiveRank, ...] = ()
    ended: tuple[int, ...] = ()


class Spawned(Message, frozen=True, kw_only=True, tag="spawned"):
    """These ranks were started; they have not run a line of the script yet."""

    ranks: tuple[LiveRank, ...]
    generation: int


class Exited(Message, frozen=True, kw_only=True, tag="exited"):
    """A rank's process ended. finished: as its heartbeat page said."""

    rank: int
    pid: int
    exit: Exit
    finished: int
    error: ErrorRecord | None = None
    at: float = 0.0


class SpawnFailed(Message, frozen=True, kw_only=True, tag="spawn-failed"):
    """A rank could not be started at all."""

    rank: int
    error: str


class StoreUp(Message, frozen=True, kw_only=True, tag="store-up"):
    """The store asked for by HostStore listens; port 0 and `error`: it could not."""

    serial: int
    port: int
    error: str = ""


class StoreDown(Message, frozen=True, kw_only=True, tag="store-down"):
    """The store's process ended; ranks that are in a generation do not notice."""

    serial: int


class Snapshots(Message, frozen=True, kw_only=True, tag="snapshots"):
    """Steps of the intact snapshots of ranks of this node."""

    steps: dict[int, tuple[int, ...]]


class CheckpointWritten(Message, frozen=True, kw_only=True, tag="checkpoint-written"):
    """A checkpoint was committed, or `error` says why not. last_words: it answers Dump."""

    step: int
    path: str = ""
    bytes: int = 0
    seconds: float = 0.0
    last_words: bool = False
    error: str = ""


class CheckpointPassedOver(Message, frozen=True, kw_only=True, tag="checkpoint-passed-over"):
    """A checkpoint newer than the one that counts is not valid."""

    path: str
    reason: str


class Beat(Message, frozen=True, kw_only=True, tag="beat"):
    """Steps finished by each rank of the node, and the newest metrics of its first one."""

    finished: dict[int, int]
    total: int = 0
    metrics: dict[str, float] = {}


# ---- coordinator -> agent


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The agent is taken in as this node; SPARE: as a spare."""

    node: int


class Promote(Message, frozen=True, kw_only=True, tag="promote"):
    """A spare is wanted as this node: it says hello as such."""

    node: int


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The agent is not taken in; it stops its ranks and ends."""

    reason: str


class Spawn(Message, frozen=True, kw_only=True, tag="spawn"):
    """Start these ranks; they arrive for `generation`.

    world_size, first: what they are told of their world, and of the place in it of the node's first
    rank; the generation that they arrive for may be another one.
    """

    generation: int
    restart: int
    ranks: tuple[int, ...]
    world_size: int
    first: int
    store_host: str
    store_port: int


class HostStore(Message, frozen=True, kw_only=True, tag="host-store"):
    """Start a store for the ranks; an earlier one of this agent is ended."""

    serial: int
    port: int


class Kill(Message, frozen=True, kw_only=True, tag="kill"):
    """End these ranks: SIGTERM, then SIGKILL after `grace_s` (0: SIGKILL at once)."""

    ranks: tuple[int, ...]
    grace_s: float = 0.0


class Dump(Message, frozen=True, kw_only=True, tag="dump"):
    """Last words: write the snapshot of `step`, or a newer one, to the store."""

    generation: int
    step: int


class InjectionKind(str, enum.Enum):
    """Faults that a rank can be told to suffer; see rekindle.training.torch_injection."""

    KILL = "kill"
    NODE_LOST = "node-lost"
    HANG = "hang"
    SLOW = "slow"
    EXCEPTION = "exception"
    OOM = "oom"
    UCE = "uce"
    TORN_UPDATE = "torn-update"


class Inject(Message, frozen=True, kw_only=True, tag="inject"):
    """Suffer a fault in this step (None: the next one). seconds: how long a slow step pauses."""

    rank: int
    kind: InjectionKind
    step: int | None = None
    seconds: float = 1.0


class Bye(Message, frozen=True, kw_only=True, tag="bye"):
    """The job is over for this agent: end what is left, and yourself with this status.

    at_once: without waiting for what is being written.
    """

    status: int
    at_once: bool = False


FromRank = Arrived | StepFailed | Held | StateReady | StepDone | SnapshotRoom | SnapshotTaken
ToRank = Over | Hold | Form | SnapshotBuffers | Dismiss | Inject
FromAgent = (
    Hello
    | Spawned
    | Exited
    | SpawnFailed
    | StoreUp
    | StoreDown
    | Snapshots
    | CheckpointWritten
    | CheckpointPassedOver
    | Beat
    | Arrived
    | StepFailed
    | Held
    | StateReady
    | StepDone
)
ToAgent = (
    Welcome
    | Refused
    | Promote
    | Spawn
    | HostStore
    | Kill
    | Dump
    | Bye
    | Over
    | Hold
    | Form
    | Dismiss
    | Inject
)


def ranks_named(message: Message) -> tuple[int, ...]:
    """Return the ranks that a message of an agent or a rank is about."""
    match message:
        case Spawned(ranks=live) | Hello(ranks=live):
            return tuple(rank.rank for rank in live)
        case Beat(finished=by_rank) | Snapshots(steps=by_rank):
            return tuple(by_rank)
    rank = getattr(message, "rank", None)
    return () if rank is None else (rank,)
