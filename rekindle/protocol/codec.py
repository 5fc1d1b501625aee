"""Encodes and decodes messages, one msgpack object each; a decoder accepts one direction only."""

from __future__ import annotations

import msgspec

from rekindle.errors import ProtocolError
from rekindle.protocol import agent as protocol

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: protocol.Message) -> bytes:
    """Encode a message, for any direction."""
    return _ENCODER.encode(message)


class Decoder:
    """Decodes the messages of one direction, and refuses any other.

    `what` names the sender in error texts.
    """

    def __init__(self, union: object, what: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[protocol.Message] = msgspec.msgpack.Decoder(union)
        self._what = what

    def __call__(self, data: bytes) -> protocol.Message:
        """Decode one message. Raises ProtocolError: it is not a message of this direction."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a message of {self._what}: {error}") from error


decode_from_rank = Decoder(protocol.FromRank, "a rank")
decode_to_rank = Decoder(protocol.ToRank, "an agent")
decode_from_agent = Decoder(protocol.FromAgent, "an agent")
decode_to_agent = Decoder(protocol.ToAgent, "a coordinator")
