"""The connection of a replica server and a caller: authenticated messages, and snapshots.

Each end starts with a random number. In every message it uses the other's number to prove that it
knows the job's secret, without sending the secret. A message is its length, its proof, and msgpack.
The bytes of a snapshot follow the message that announces them, and their checksum proves them.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from rekindle.errors import ProtocolError
from rekindle.protocol.snapshot_buffer import arriving, seal_of
from rekindle.supervised import within

SILENCE_S = 10.0  # the other side counts as lost after this silence
LONGEST = 4096  # bytes of a message
_PIECE = 4 << 20  # bytes that one transfer moves before others can run
_SLOWEST = 100 << 20  # bytes a second, at least, for making memory and computing checksums
_NONCE = 32
_HEAD = struct.Struct("!I32s")  # length and proof of a message

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True, slots=True)
class Credentials:
    """The identity of an agent of this attempt that knows the job's secret; only such may call."""

    job_id: str
    attempt: int
    secret: str


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """Keep this snapshot. The server answers twice: with the bytes that it wants, and at the end.

    state: the state in the snapshot. since: the finished steps at the start of
    `generation`. The agent sends the snapshot for this generation.
    """

    job_id: str
    attempt: int
    rank: int
    generation: int
    since: int
    state: tuple[Count, Count]
    bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    checksum: str


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Return this snapshot; its bytes follow the answer.

    own: return the copy of what the rank shares with no other, which this agent has for its place.
    """

    job_id: str
    attempt: int
    rank: int
    state: tuple[Count, Count]
    own: bool = False


class ReplicaAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the transfer, or an error. stale: the snapshot is from an earlier generation."""

    bytes: int = 0
    checksum: str = ""
    stale: bool = False
    error: str = ""


REQUESTS: msgspec.msgpack.Decoder[Put | Fetch] = msgspec.msgpack.Decoder(Put | Fetch)
ANSWERS: msgspec.msgpack.Decoder[ReplicaAnswer] = msgspec.msgpack.Decoder(ReplicaAnswer)


def patience_s(size: int) -> float:
    """Return the time limit for an answer that must process `size` bytes, in seconds."""
    return SILENCE_S + size / _SLOWEST


class ReplicaConnection:
    """One connection. The proofs of server and caller differ, so one cannot replace the other."""

    silence_s = SILENCE_S

    def __init__(self, connection: socket.socket, secret: str, *, serves: bool) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._secret = secret.encode()
        self._roles = (b"server", b"caller") if serves else (b"caller", b"server")
        self._nonces = (b"", b"")  # theirs, ours
        self._counts = [0, 0]  # messages sent, and received

    async def meet(self) -> None:
        """Exchange the random numbers for the proofs."""
        ours = secrets.token_bytes(_NONCE)
        await self._send(ours)
        self._nonces = bytes(await self._receive(_NONCE)), ours

    async def say(self, message: msgspec.Struct) -> None:
        """Send a message."""
        text = msgspec.msgpack.encode(message)
        await self._send(_HEAD.pack(len(text), self._proof(0, text)) + text)

    async def receive_message(
        self, decoder: msgspec.msgpack.Decoder[T], *, limit_s: float = 0.0
    ) -> T:
        """Wait for a message.

        Raises ProtocolError: it is not an expected message, or its proof is wrong.
        """
        length, proof = _HEAD.unpack(await self._receive(_HEAD.size, limit_s))
        if length > LONGEST:
            raise ProtocolError(f"a message has {length} bytes; at most {LONGEST} are allowed")
        text = await self._receive(length)
        if not hmac.compare_digest(proof, self._proof(1, text)):
            raise ProtocolError("the other side does not know the job's secret")
        try:
            return decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a message of a replica server: {error}") from error

    def _proof(self, side: int, text: bytes | bytearray) -> bytes:
        self._counts[side] += 1
        about = self._roles[side] + self._nonces[side] + self._counts[side].to_bytes(4, "big")
        return hmac.digest(self._secret, about + text, "sha256")

    async def send(self, content: memoryview) -> None:
        """Send the bytes of a snapshot."""
        for begin in range(0, len(content), _PIECE):
            with content[begin : begin + _PIECE] as piece:
                await self._send(piece)
            await asyncio.sleep(0)

    async def receive(self, content: memoryview) -> str:
        """Fill `content` with the received bytes; return their seal.

        This computes the seal during the transfer, while the bytes are in the processor's cache. So
        received bytes are never present without a check.
        """
        done, sealer = 0, arriving()
        while done < len(content):
            with content[done : done + _PIECE] as piece:
                count = await self._receive_some(piece)
                sealer.add(piece[:count])
            done += count
            await asyncio.sleep(0)
        return seal_of(sealer.digests())

    async def _send(self, data: bytes | memoryview) -> None:
        loop = asyncio.get_running_loop()
        await within(loop.sock_sendall(self._socket, data), self.silence_s)

    async def _receive(self, size: int, limit_s: float = 0.0) -> bytearray:
        data, done = bytearray(size), 0
        while done < size:
            with memoryview(data)[done:] as rest:
                done += await self._receive_some(rest, limit_s)
        return data

    async def _receive_some(self, into: memoryview, limit_s: float = 0.0) -> int:
        receives = asyncio.get_running_loop().sock_recv_into(self._socket, into)
        count = await within(receives, max(limit_s, self.silence_s))
        if not count:
            raise ConnectionError("the other side closed the connection")
        return count
