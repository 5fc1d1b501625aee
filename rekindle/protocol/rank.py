"""What agent and rank say to each other: a part of the protocol, see rekindle.protocol.agent."""

from __future__ import annotations

import enum
import re

import msgspec

from rekindle.profiling.switch import Switch
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.invalid_states import Suspicion
from rekindle.recovery.policy.plan import Made, RankPlan


def _tag(name: str) -> str:
    """Return the tag of a message on the wire: its class's name, as in "step-done"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=_tag):
    """Base of all messages.

    An agent keeps a lasting message for the next coordinator if this one may not have received it.
    """

    @property
    def lasting(self) -> bool:
        """Whether the message is true for any coordinator."""
        return False

    @property
    def ranks_named(self) -> tuple[int, ...]:
        """The ranks that the sender speaks for."""
        rank = getattr(self, "rank", None)
        return () if rank is None else (rank,)


# ---- rank -> agent


class Arrived(Message, frozen=True, kw_only=True):
    """The rank waits for a generation: at the start of its Session, or after leaving a step.

    shard: which piece of the training state it holds; None: there is one, and all ranks hold it.
    finished: steps it has finished, None: its state was just built by the script.
    torn: its state is of no step, for it was interrupted while that was changed.
    made: the generation that did the last of them.
    clean: what StepFailed says of it; said again here, for a coordinator may not have heard it.
    done: it has finished all the steps it was asked for.
    passed: steps after which all ranks were let go before, where the script asked for more later.
    port: where other ranks reach it, of ranks whose framework brings no lines between them.
    joins: it has nothing but what a live rank sends it, and does not begin by itself.
    """

    rank: int
    generation: int
    shard: int | None = None
    finished: int | None = None
    torn: bool = False
    made: int = 0
    clean: int | None = None
    done: bool = False
    passed: int = 0
    port: int = 0
    joins: bool = False


class StepFailed(Message, frozen=True, kw_only=True):
    """A step of this generation raised what is no error of the script; the rank waits for orders.

    kind: LINK, a collective failed, most likely because a peer did; TRANSIENT; DEVICE_MEMORY; or,
    said after a repair was tried, DEVICE: this process cannot go on. finished: steps, before it.
    clean: what all ranks have made after so many steps may be wrong; None: it is right.
    """

    rank: int
    generation: int
    kind: FaultKind
    error: str
    finished: int
    clean: int | None = None

    @property
    def lasting(self) -> bool:
        """Whether it names states that no later generation may use."""
        return self.clean is not None


class Paused(Message, frozen=True, kw_only=True):
    """The rank stands between two steps and begins no other: it answers Hold."""

    rank: int
    generation: int
    finished: int


class StateReady(Message, frozen=True, kw_only=True):
    """The rank has the state that the plan named; `error` says why not."""

    rank: int
    generation: int
    error: str = ""


class StepDone(Message, frozen=True, kw_only=True):
    """The rank has finished its first step of this generation."""

    rank: int
    generation: int
    finished: int


class BufferRequest(Message, frozen=True, kw_only=True):
    """The rank asks its agent for buffers of this size; answered by BufferGrant.

    bytes 0: it asks for the buffers that exist, to read them.
    copy: the state whose copy is fetched from the other node first, as one of the rank's snapshots.
    serial: of the rank's requests; a later one may be answered before this one.
    """

    rank: int
    bytes: int
    buffers: int
    copy: Made | None = None
    serial: int = 0


class SnapshotTaken(Message, frozen=True, kw_only=True):
    """The rank has filled a buffer; `checkpoint`: the agent writes it to the store as well.

    shard, shards: which piece of the state it is, and of how many. stall_s: for how many seconds
    training stood still for it.
    """

    rank: int
    generation: int
    step: int
    buffer: int
    checkpoint: bool = False
    stall_s: float = 0.0
    shard: int = 0
    shards: int = 1


# ---- agent -> rank


class GenerationEnded(Message, frozen=True, kw_only=True):
    """Generation `generation` is over: leave your collective and arrive for the next.

    finished: steps for which some rank is known to have had all gradients; a step less is not left
        at once, for it can still end.
    replaced: a process is gone, and a new one is to join those that are there.
    """

    generation: int
    finished: int = 0
    replaced: bool = False


class PauseRequest(Message, frozen=True, kw_only=True):
    """Stop before the next step, say so, and wait for the end of this generation.

    The world is about to grow. While one rank holds, no other can be in a collective but in that of
    the next step, or at the end of the last one.
    """

    rank: int
    generation: int


class ReplicaAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where an agent takes copies of other nodes' snapshots, and gives them back."""

    host: str
    port: int


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks record of the time that their steps take.

    since: when the job switched recording on first, in seconds since the epoch. It names the
    folder of the records if the job has no id of a task.
    """

    switch: Switch = Switch()
    since: int = 0


class Settings(Message, frozen=True, kw_only=True):
    """Settings of all ranks, from their next step on.

    checkpoint_every: steps between two checkpoints; 0: none. Ranks may receive it in different
    steps: a checkpoint that is not due on all of them is not written.
    """

    checkpoint_every: int = 0
    profile: Profile = Profile()


class FormGeneration(Message, frozen=True, kw_only=True):
    """Form this generation at the named store, with state as planned, and go on from `step`.

    made: the generation that did that step. suspicions: what must not be kept.
    ranks: what each rank of the receiving node is in this world; elsewhere a rank is called by its
    number in the full one. plan: what each of them does, with peers by their number in this
    world. An agent passes on only the rank's own of both. shards: pieces that the state is in.
    replica_addresses: where those of the nodes are that the plan names; for the agent alone.
    settings: until the next Settings. peers: the address (host, port) of each rank, by its place in
    this world; empty: they have no ports.
    """

    generation: int
    world_size: int
    store_host: str
    store_port: int
    step: int
    made: int = 0
    suspicions: tuple[Suspicion, ...] = ()
    shards: int = 1
    passed: int = 0
    settings: Settings = Settings()
    ranks: dict[int, int]
    plan: dict[int, RankPlan]
    replica_addresses: dict[int, ReplicaAddress] = msgspec.field(default_factory=dict)
    peers: tuple[tuple[str, int], ...] = ()


class BufferGrant(Message, frozen=True, kw_only=True):
    """Memory files come with this message, if `error` is empty; `serial`: of the request."""

    error: str = ""
    serial: int = 0


class Dismiss(Message, frozen=True, kw_only=True):
    """All ranks have finished all steps: the Session may end."""

    finished: int


class InjectionKind(str, enum.Enum):
    """Faults that a rank can be told to suffer; see rekindle.training.torch.faults.injection.

    Of those that hang: `hang` sleeps in Python, `hang-collective` waits in a collective that nobody
    else is in, `hang-data` for a data loader, `stop` is stopped by a signal, and `livelock`
    computes without an end.
    """

    KILL = "kill"
    NODE_LOST = "node-lost"
    HANG = "hang"
    HANG_COLLECTIVE = "hang-collective"
    HANG_DATA = "hang-data"
    STOP = "stop"
    LIVELOCK = "livelock"
    SLOW = "slow"
    EXCEPTION = "exception"
    OOM = "oom"
    UCE = "uce"
    TORN_UPDATE = "torn-update"


class Inject(Message, frozen=True, kw_only=True):
    """Inject a fault in this step (None: the next one). seconds: how long a slow step pauses."""

    rank: int
    kind: InjectionKind
    step: int | None = None
    seconds: float = 1.0


FromRank = Arrived | StepFailed | Paused | StateReady | StepDone | BufferRequest | SnapshotTaken
ToRank = GenerationEnded | PauseRequest | FormGeneration | Settings | BufferGrant | Dismiss | Inject
