"""Messages between ranks, agents and the coordinator: encoded, decoded, and refused."""

from __future__ import annotations

import contextlib
import resource
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle.checkpoints.manifest import FileEntry
from rekindle.errors import ProtocolError
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import StateDigest
from rekindle.states import StateId

DIRECTIONS = {
    "from a rank": (p.FromRank, p.decode_from_rank),
    "to a rank": (p.ToRank, p.decode_to_rank),
    "from an agent": (p.FromAgent, p.decode_from_agent),
    "to an agent": (p.ToAgent, p.decode_to_agent),
}
EVERY = sorted(
    {kind for union, _ in DIRECTIONS.values() for kind in get_args(union)},
    key=lambda kind: kind.__name__,
)


def any_of(kind: type) -> st.SearchStrategy[Any]:
    """Return values of a structure with random fields."""
    return st.builds(kind, **{name: value(of) for name, of in get_type_hints(kind).items()})


def value(of: Any) -> st.SearchStrategy[Any]:
    """Return values of an annotation that msgpack can encode; its integers have 64 bits."""
    inner = get_args(of)
    if of is FileEntry:
        digests = st.from_regex(r"\Axxh3_128:[0-9a-f]{32}\Z")
        counts = st.integers(0, 2**64 - 1)
        ranks = st.lists(counts, max_size=4).map(tuple)
        return st.builds(FileEntry, name=st.text(), bytes=counts, checksum=digests, ranks=ranks)
    if of is int:
        return st.integers(-(2**63), 2**64 - 1)
    if of is float:
        return st.floats(allow_nan=False)
    if get_origin(of) is dict:
        return st.dictionaries(value(inner[0]), value(inner[1]), max_size=4)
    if get_origin(of) is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*map(value, inner))
    if get_origin(of) is tuple:
        return st.lists(value(inner[0]), max_size=4).map(tuple)
    if get_origin(of) in (Union, UnionType):
        return st.one_of([value(one) for one in inner])
    if isinstance(of, type) and issubclass(of, msgspec.Struct | StateDigest | StateId):
        return any_of(of)
    return st.from_type(of)


messages = st.one_of([any_of(kind) for kind in EVERY])
directions = st.sampled_from(sorted(DIRECTIONS))


def members(direction: str) -> set[type]:
    """Return the messages that are valid in one direction."""
    return set(get_args(DIRECTIONS[direction][0]))


def test_every_message_has_a_direction_and_a_tag_of_its_own() -> None:
    """Every message type is in a union, and no two types have the same tag."""
    defined = set(p.Message.__subclasses__())
    assert defined == set(EVERY)
    tags = [kind.__struct_config__.tag for kind in EVERY]
    assert len(set(tags)) == len(tags)


@given(messages)
def test_a_message_arrives_as_it_was_sent(message: p.Message) -> None:
    """In each valid direction, a decoded message is equal to the encoded message."""
    for direction, (_, decode) in DIRECTIONS.items():
        if type(message) in members(direction):
            assert decode(p.encode(message)) == message


@given(messages, directions)
def test_a_message_of_another_direction_is_refused(message: p.Message, direction: str) -> None:
    """A rank cannot send messages of a coordinator, and an agent cannot send messages of a rank."""
    if type(message) not in members(direction):
        with pytest.raises(ProtocolError, match="not a message of"):
            DIRECTIONS[direction][1](p.encode(message))


@given(st.binary(max_size=200), directions)
@example(b"", "from an agent")
@example(b"\xc1", "from an agent")
@example(b"GET / HTTP/1.1\r\n\r\n", "from an agent")
@example(b"\x91" * 100_000, "from an agent")
@example(b"\x81\xa4type" + b"\x91" * 100_000, "from an agent")
@example(msgspec.msgpack.encode({"type": "no-such-message"}), "to an agent")
@example(msgspec.msgpack.encode({"type": "welcome", "node": 0, "more": 1}), "to an agent")
@example(msgspec.msgpack.encode({"type": "welcome"}), "to an agent")
@example(msgspec.msgpack.encode({"type": "welcome", "node": "0"}), "to an agent")
@example(msgspec.msgpack.encode({"type": "welcome", "node": None}), "to an agent")
@example(b"\x82\xa4type\xa7refused\xa6reason\xa2\xff\xfe", "to an agent")
def test_garbage_is_a_protocol_error(data: bytes, direction: str) -> None:
    """For any bytes, the decoder returns a valid message or raises ProtocolError."""
    with contextlib.suppress(ProtocolError):
        assert type(DIRECTIONS[direction][1](data)) in members(direction)


@given(messages, st.data())
def test_a_truncated_message_is_refused(message: p.Message, data: st.DataObject) -> None:
    """The decoder refuses a truncated message."""
    encoded = p.encode(message)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    for _, decode in DIRECTIONS.values():
        with pytest.raises(ProtocolError):
            decode(encoded[:cut])


@given(messages, st.binary(min_size=1, max_size=8))
def test_a_message_with_something_behind_it_is_refused(message: p.Message, rest: bytes) -> None:
    """The decoder refuses bytes after the message, because one frame has one message."""
    for _, decode in DIRECTIONS.values():
        with pytest.raises(ProtocolError):
            decode(p.encode(message) + rest)


@given(messages, st.data())
def test_a_message_with_a_flipped_byte_never_breaks_the_reader(
    message: p.Message, data: st.DataObject
) -> None:
    """For a damaged message, the decoder raises ProtocolError or returns a valid message."""
    encoded = bytearray(p.encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    for direction, (_, decode) in DIRECTIONS.items():
        with contextlib.suppress(ProtocolError):
            assert type(decode(bytes(encoded))) in members(direction)


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\xdd\x0f\xff\xff\xff"], ids=["4 billion", "268 million"]
)
@pytest.mark.parametrize(
    ("tag", "field"), [("spawned", "ranks"), ("snapshots", "kept"), ("heartbeat", "finished")]
)
def test_an_array_that_claims_to_be_huge_takes_no_memory(head: bytes, tag: str, field: str) -> None:
    """The decoder does not reserve memory for a declared length before the elements arrive."""
    if field != "ranks":
        head = b"\xdf" + head[1:]  # a map
    encode = msgspec.msgpack.encode
    data = b"\x82" + encode("type") + encode(tag) + encode(field) + head
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ProtocolError):
        p.decode_from_agent(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
