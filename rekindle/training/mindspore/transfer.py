"""Transfer a MindSpore rank's state to and from another rank, or take it from the store."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from rekindle import names
from rekindle.checkpoints.format import METADATA_POSITION, encode_header, plan_layout, read_header
from rekindle.checkpoints.open_store import find_checkpoint
from rekindle.checkpoints.pins import reading
from rekindle.checkpoints.store import read_file
from rekindle.errors import CorruptError, SessionError
from rekindle.rank.channel import Channel
from rekindle.rank.snapshot_writer import METADATA_SKELETON, kept
from rekindle.rank.step_vote import STATE, Address, StepVote, receive
from rekindle.recovery.policy.plan import RankPlan, StateId, StateSource
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
