"""The messages between agent and rank, and how all messages are encoded.

These messages are a part of the protocol, see rekindle.protocol.agent. Each message is one msgpack
object. A decoder accepts one direction only.
"""

from __future__ import annotations

import enum
import re

import msgspec

from rekindle.errors import ProtocolError
from rekindle.profiling.switch import Switch
from rekindle.protocol.heartbeat_page import StateDigest
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.plan import RankPlan
from rekindle.states import StateId, Suspicion

_ENCODER = msgspec.msgpack.Encoder()


def _tag(name: str) -> str:
    """Return the tag of a message in its encoding: the name of its class, as in "step-done"."""
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
        """The ranks about which the sender reports."""
        rank = getattr(self, "rank", None)
        return () if rank is None else (rank,)


def encode(message: Message) -> bytes:
    """Encode a message, for any direction."""
    return _ENCODER.encode(message)


class Decoder:
    """Decodes the messages of one direction, and refuses any other.

    `what` names the sender in error texts.
    """

    def __init__(self, union: object, what: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        self._what = what

    def __call__(self, data: bytes) -> Message:
        """Decode one message. Raises ProtocolError: it is not a message of this direction."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a message of {self._what}: {error}") from error


# ---- rank -> agent


class Arrived(Message, frozen=True, kw_only=True):
    """The rank waits for a generation: at the start of its Session, or after it left a step.

    shard: the shard of the training state that it holds; None: all ranks hold the same state.

    finished: its finished steps; None: the script has just built the state.
    state_generation: the generation that did the last of these steps.

    torn: the state belongs to no step, because a fault interrupted a change of it.
    done: it has finished all steps that the script wants.

    valid_steps: as in StepFailed. It is repeated because a coordinator may not have that message.
    ended_step: the finished steps when all Sessions ended before. The script wanted more later.

    port: where other ranks connect to it, if the framework does not connect ranks.
    needs_peer: it can only take its state from a live rank, and does not begin alone.
    stands: the only number of finished steps from which its code can continue; None: any.

    sources: the digest of each file of the script's own code that its process has loaded, by path.

    replicas: ranks with the same number share their parameters and their optimizer's state.
    items: the names of other objects whose digests the rank puts on its heartbeat page.
    digests: of its present state, if its last generation has ended.
    tensors: digests of the tensors of the state that GenerationEnded.compare names, in groups with
        a common prefix of their names.
    compared: the steps of these processes after which the ranks have searched for objects that the
        Session does not keep.

    own: the states whose part of this rank alone is in the memory of its agent; None: the rank has
        no such part. Only with that part it can take a state from a peer.
    """

    rank: int
    generation: int
    shard: int | None = None
    finished: int | None = None
    torn: bool = False
    state_generation: int = 0
    valid_steps: int | None = None
    done: bool = False
    ended_step: int = 0
    port: int = 0
    needs_peer: bool = False
    stands: int | None = None
    sources: dict[str, str] = {}
    replicas: int = 0
    items: tuple[str, ...] = ()
    digests: tuple[StateDigest, ...] = ()
    tensors: dict[str, int] = {}
    compared: int = 0
    own: tuple[StateId, ...] | None = None


class StepFailed(Message, frozen=True, kw_only=True):
    """A step of this generation failed without an error of the script; the rank waits for orders.

    kind: LINK (a collective failed, most likely because a peer did), TRANSIENT or DEVICE_MEMORY.
    After an attempt to repair it is DEVICE: this process cannot continue.

    finished: the steps before it. valid_steps: the number of steps after which the states of all
    ranks may be wrong. None: they are right.
    """

    rank: int
    generation: int
    kind: FaultKind
    error: str
    finished: int
    valid_steps: int | None = None

    @property
    def lasting(self) -> bool:
        """Whether it names states that no later generation may use."""
        return self.valid_steps is not None


class Paused(Message, frozen=True, kw_only=True):
    """The rank stands between two steps and does not begin another: it answers PauseRequest."""

    rank: int
    generation: int
    finished: int


class StateReady(Message, frozen=True, kw_only=True):
    """The rank has its state of this generation; `error`: why it does not.

    finished: the steps of the state. MindIO's handlers may load an older one than the plan names.
    If a new process of a MindIO script loads its state itself, these are the steps of the plan.
    """

    rank: int
    generation: int
    finished: int
    error: str = ""


class StepDone(Message, frozen=True, kw_only=True):
    """The rank has finished its first step of this generation."""

    rank: int
    generation: int
    finished: int


class StepLeftOut(Message, frozen=True, kw_only=True):
    """All ranks skip this step, because its update would damage the model. One rank reports it."""

    rank: int
    generation: int
    step: int
    reason: str

    @property
    def lasting(self) -> bool:
        """Whether the message is true for any coordinator: it is."""
        return True


class BufferRequest(Message, frozen=True, kw_only=True):
    """The rank asks its agent for buffers of this size. The answer is BufferGrant.

    bytes 0: it asks for the existing buffers, to read them.

    copy: a state whose copy the agent first fetches from the other node, into one of the buffers.
    serial: number of the request; the agent may answer a later request first.

    own: it asks for the copies of the state that it shares with no other rank. Without such copies
        the answer has no descriptors. copy: the agent fetches it from the node's former agent.
    """

    rank: int
    bytes: int
    buffers: int
    copy: StateId | None = None
    serial: int = 0
    own: bool = False


class SnapshotTaken(Message, frozen=True, kw_only=True):
    """The rank has filled a buffer. `checkpoint`: the agent also writes it to the store.

    shard, shards: the shard of the state, and the number of all shards. stall_s: the seconds that
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


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a generation ended.

    kind: the kind of the fault. Without a fault: `join` (nodes join the world), `node-check` (slow
    nodes are checked) or `planned` (a node moves). strategy: how the job answers; empty: it has not
    decided, or there is no fault. ranks: those that failed or get new processes, by their numbers
    in the full world.
    """

    kind: str
    strategy: str = ""
    ranks: tuple[int, ...] = ()


class GenerationEnded(Message, frozen=True, kw_only=True):
    """Generation `generation` is over: leave your collective and arrive for the next one.

    finished: steps for which at least one rank is known to have had all gradients. A rank does not
        leave a step up to this number at once, because the step can still end.
    process_lost: a process has ended. A new one joins the live ones.
    cause: as far as it is known at this time.
    compare: ranks hold different states after this one: send the digests of its tensors.
    """

    generation: int
    finished: int = 0
    process_lost: bool = False
    cause: Cause | None = None
    compare: StateId | None = None


class PauseRequest(Message, frozen=True, kw_only=True):
    """Stop before the next step, answer Paused, and wait for the end of this generation.

    The world is about to grow. While one rank pauses, another one can only be in a collective of
    the next step, or at the end of the last one.
    """

    rank: int
    generation: int


class ReplicaAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which an agent receives and returns copies of other nodes' snapshots."""

    host: str
    port: int


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The profiling of steps, as all ranks of a job record it.

    since: when the job first switched recording on, in seconds since the epoch. It names the
    folder of the records if the job has no task id.
    """

    switch: Switch = Switch()
    since: int = 0


class Settings(Message, frozen=True, kw_only=True):
    """Settings of all ranks; they apply to the next step.

    checkpoint_every: steps between two checkpoints; 0: none. Ranks may receive it in different
    steps: the agents write a checkpoint only if it is due on all ranks.
    """

    checkpoint_every: int = 0
    profile: Profile = Profile()


class FormGeneration(Message, frozen=True, kw_only=True):
    """Form this generation at the given store, with the planned state, and continue from `step`.

    state_generation: the generation that did that step. suspicions: states that ranks must not
    keep.
    ended_step, compared: the highest of those in Arrived. cause: why the former generation ended;
    None: this is the first one. shards: the number of shards. settings: valid until the next
    Settings.

    ranks: the number in this world of each rank of the receiving node. Its key is the rank's number
    in the full world. plan: the part of each of these ranks, with peers by their number in this
    world. An agent sends each rank only its own entries of both.

    replica_addresses: the addresses of the nodes that the plan names; for the agent alone.
    former: the address of the agent from which the node has moved. It still has the copies of what
        each rank shares with no other. None: the node has not moved. For the agent alone.
    peers: the address (host, port) of each rank, by its number in this world. Empty: no ports.
    """

    generation: int
    world_size: int
    store_host: str
    store_port: int
    step: int
    state_generation: int = 0
    suspicions: tuple[Suspicion, ...] = ()
    shards: int = 1
    ended_step: int = 0
    compared: int = 0
    cause: Cause | None = None
    settings: Settings = Settings()
    ranks: dict[int, int]
    plan: dict[int, RankPlan]
    replica_addresses: dict[int, ReplicaAddress] = msgspec.field(default_factory=dict)
    former: ReplicaAddress | None = None
    peers: tuple[tuple[str, int], ...] = ()


class BufferGrant(Message, frozen=True, kw_only=True):
    """Memory files accompany this message if `error` is empty. serial: that of the request."""

    error: str = ""
    serial: int = 0


class EndSession(Message, frozen=True, kw_only=True):
    """All ranks have finished all steps: the Session may end."""

    finished: int


class InjectionKind(str, enum.Enum):
    """Faults that an order injects into a rank; see rekindle.training.torch.faults.repairs.

    Five of them hang: `hang` sleeps in Python, `hang-collective` waits in a collective that no
    other rank joins, `hang-data` waits for a data loader, `stop` stops the rank by a signal, and
    `livelock` computes without an end.
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


FromRank = (
    Arrived
    | StepFailed
    | Paused
    | StateReady
    | StepDone
    | StepLeftOut
    | BufferRequest
    | SnapshotTaken
)
ToRank = (
    GenerationEnded | PauseRequest | FormGeneration | Settings | BufferGrant | EndSession | Inject
)

decode_from_rank = Decoder(FromRank, "a rank")
decode_to_rank = Decoder(ToRank, "an agent")
