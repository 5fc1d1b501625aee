"""Do a MindSpore rank's part in each generation: its gate, and its state from another source."""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from rekindle import names
from rekindle.checkpoints.format import METADATA_POSITION, encode_header, plan_layout, read_header
from rekindle.checkpoints.open_store import find_checkpoint
from rekindle.checkpoints.store import read_file, reading
from rekindle.errors import CorruptError, SessionError
from rekindle.protocol.rank import FormGeneration, GenerationEnded
from rekindle.rank.channel import Channel
from rekindle.rank.member import Arrival
from rekindle.rank.progress import HeldState, ProgressReporter, RankPlace
from rekindle.rank.snapshot_writer import METADATA_SKELETON, kept
from rekindle.rank.step_vote import STATE, Address, StepVote, VotingGenerations, receive
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.plan import RankPlan, StateSource
from rekindle.states import StateId
from rekindle.training.mindspore.faults import Device, GraphStep
from rekindle.training.mindspore.state import (
    SKELETON,
    Array,
    Parameters,
    bytes_of,
    forms_of,
    read_state,
)

_BEGIN = struct.Struct("<q")  # the number of bytes of the file that follows
_DIGEST_BYTES = 16
_NOWHERE: Mapping[str, Any] = {}


class MindSporeGenerations(VotingGenerations):
    """Forms the generations of one rank; an adapter of `rekindle.rank.member.Member`.

    place: the rank's place, which decides who writes the state. position: the values that the
    snapshots keep with the state. fetched: the position of a state that came from another source.
    stored: the store has the state. step: the step whose graph runs.

    damaged: the device's memory had an error. valid_steps: the number of steps after which a memory
    error may have reached the states of all ranks; None: it has reached none.
    """

    def __init__(
        self,
        slot: int,
        parameters: Parameters,
        device: Device,
        channel: Channel | None,
        state: HeldState,
        progress: ProgressReporter,
    ) -> None:
        super().__init__(state, progress)
        self.place = RankPlace(slot)
        self.position: Mapping[str, Any] = {"step": 0}
        self.fetched: Mapping[str, Any] = {}
        self.stored = False
        self.step = GraphStep(parameters)
        self.damaged = False
        self.valid_steps: int | None = None
        self._broken = False  # this rank's graph raised an error
        self._device = device
        self._parameters = parameters
        self._channel = channel

    def arrival(self) -> Arrival:
        """Return the values that MindSpore adds to `Arrived`."""
        done = self._state.whole and 0 < self._progress.total <= self._state.finished
        return Arrival(done, port=self.listener.port, valid_steps=self.valid_steps)

    def end_step(self) -> None:
        """End the step whose graph has been called. Raises RuntimeError: the device broke in it."""
        self._device.finish()
        self.step.end()

    def break_step(self, kind: FaultKind, *, spread: bool) -> bool:
        """Leave a step that raised an error; False: only new processes can continue.

        spread: the error may have reached the states of all ranks.
        A device that cannot be interrupted must have ended all its collectives. Those before the
        updates have ended once all updates have begun. An error of a callback shows nothing.
        """
        step = self.step
        if not (self._device.interrupts or step.updated):
            return False
        if spread:
            # Without a known update in this graph, the newest one may be that of the last step.
            self.valid_steps = max(0, self._state.finished - (not step.updated))
        step.running = False
        self._broken, self.damaged = True, kind is FaultKind.DEVICE_MEMORY
        return True

    def recover(self) -> None:
        """Clean the device. Raises UnusableError: only a new process can use it."""
        unharmed = self._device.clean(damaged=self.damaged, broken=self._broken)
        if not (self.step.undo() and unharmed):
            self._state.tear()
        self._broken = self.damaged = False

    def enter(self, form: FormGeneration) -> Callable[[GenerationEnded], None]:
        """Leave the former generation's gate; return a function that ends this one's forming."""
        self.place = self.place.moved(form)
        return functools.partial(self._stop, self._new_gate())

    def form(self, form: FormGeneration) -> None:
        """Meet the other ranks, and take the state that the plan names."""
        assert self._channel is not None
        slot = self.place.slot
        plan = form.plan[slot]
        state = StateId(form.step, form.state_generation)
        self.gate.form(form.generation, form.ranks[slot], form.peers)
        if plan.source is not StateSource.SELF:
            self._state.replace(plan.source)
            self.stored = plan.source is StateSource.CHECKPOINT
            self.position = self.fetched = fetch(
                self._parameters, self._channel, slot, plan, state, form.peers, self.gate
            )
        self._state.hold(state)
        self.valid_steps = None
        for peer in plan.sends_to:
            send_state(self._parameters.arrays(), self.gate.accept(peer, STATE), self.position)
        self.formed = True

    def _stop(self, gate: StepVote, _: GenerationEnded) -> None:
        """End the forming, or the step that runs.

        The gate of a formed generation stays open: all ranks agree there whether they do the next
        step.
        """
        if self.formed:
            self._device.stop(self.step)
        else:
            gate.sever()


def fetch(  # noqa: PLR0913  # the parties of the transfer
    parameters: Parameters,
    channel: Channel,
    slot: int,
    plan: RankPlan,
    state: StateId,
    peers: Sequence[Address],
    gate: StepVote,
) -> Mapping[str, Any]:
    """Take the state from the plan's source; return the position that was kept with it.

    Raises CheckpointError: the source does not have the expected state; OSError, StaleError: a peer
    is lost; SessionError: the state belongs to another model.
    """
    match plan.source:
        case StateSource.PEER:
            return receive_state(parameters, gate.connect(peers[plan.peer], STATE))
        case StateSource.SNAPSHOT:
            with kept(channel, slot, state) as buffer:
                buffer.verify()
                return take_over(parameters, buffer.file)
        case StateSource.CHECKPOINT:
            return load_checkpoint(os.environ[names.ENV_CHECKPOINT_STORE], parameters, state)
        case _:
            return {"step": 0}


def send_state(
    arrays: Mapping[str, Array], connection: socket.socket, position: Mapping[str, Any] = _NOWHERE
) -> None:
    """Send a state as a file, and then its checksum. Raises OSError: the connection is lost."""
    encoded = msgspec.json.encode(position).decode()
    metadata = {METADATA_SKELETON: SKELETON.decode(), METADATA_POSITION: encoded}
    layout = plan_layout(forms_of(arrays), metadata_room=len(msgspec.json.encode(metadata)))
    header = encode_header(layout, metadata)
    connection.sendall(_BEGIN.pack(layout.total_bytes))
    checksum = xxhash.xxh3_128(header)
    connection.sendall(header)
    for spec in layout.specs:
        row = bytes_of(arrays[spec.name])
        checksum.update(row.data)
        connection.sendall(row.data)
    connection.sendall(checksum.digest())


def receive_state(parameters: Parameters, connection: socket.socket) -> Mapping[str, Any]:
    """Take over a state from a connection; return its position.

    Raises CorruptError: the bytes differ from the bytes that were sent; OSError: the connection is
    lost; SessionError: the state belongs to another model. The parameters then keep their values.
    """
    (size,) = _BEGIN.unpack(receive(connection, _BEGIN.size))
    file = memoryview(receive(connection, size))
    if xxhash.xxh3_128_digest(file) != receive(connection, _DIGEST_BYTES):
        raise CorruptError("the state from another rank is damaged")
    return take_over(parameters, file)


def take_over(parameters: Parameters, file: memoryview) -> Mapping[str, Any]:
    """Set the parameters to a state; return the position in its file.

    Raises CorruptError: the file is invalid; SessionError: it belongs to another model.
    """
    parameters.fill(read_state(file, parameters.arrays()))
    encoded = read_header(file).metadata.get(METADATA_POSITION, "{}")
    return msgspec.json.decode(encoded, type=dict[str, Any])


def load_checkpoint(location: str, parameters: Parameters, state: StateId) -> Mapping[str, Any]:
    """Take a state from the store; return its position.

    Raises CheckpointError: it is missing; CorruptError: the file has changed since it was written;
    SessionError: it belongs to another model.
    """
    store, found = find_checkpoint(location, state)
    if len(found.manifest.files) != 1:
        raise SessionError(
            f"{found.location} has the state in {len(found.manifest.files)} pieces, but each "
            "rank of MindSpore needs the complete state"
        )
    with reading(store, state):
        file = read_file(found, found.manifest.files[0].name)
    return take_over(parameters, file)
