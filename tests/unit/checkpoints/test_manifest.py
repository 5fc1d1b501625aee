"""The manifest: a written one is read back, and other text is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import json_values, texts

from rekindle.checkpoints.format import (
    checksum,
)
from rekindle.checkpoints.manifest import FileEntry, Manifest, decode, encode
from rekindle.errors import CheckpointError, CorruptError, NewerFormatError

digests = st.binary(max_size=9).map(lambda data: checksum([data]))
file_names = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,8}\Z")
finite = st.floats(allow_nan=False, allow_infinity=False)
kept_by_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | texts | finite,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def manifest(**changes: Any) -> Manifest:
    """Return a manifest of two files, with these fields changed."""
    fields: dict[str, Any] = {
        "job_id": "job",
        "step": 5,
        "generation": 1,
        "world_size": 4,
        "framework": "torch",
        "data_position": {"epoch": 1, "seen": [2, 3]},
        "files": (
            FileEntry(name="state-0.safetensors", bytes=9, checksum=checksum([b"a"]), ranks=(0, 1)),
            FileEntry(name="state-1.safetensors", bytes=0, checksum=checksum([b""]), ranks=(2, 3)),
        ),
        "created": 1.5,
        "writer": "agent of node 0",
        "rekindle": "0.1",
    }
    return Manifest(**{**fields, **changes})


def envelope(text: bytes) -> bytes:
    """Return this text as a manifest with a correct checksum of its own."""
    return b'{"checksum":"%s","manifest":%s}' % (checksum([text]).encode(), text)


@given(
    st.builds(
        manifest,
        job_id=texts,
        step=st.integers(0, 2**70),
        data_position=st.dictionaries(texts, kept_by_json, max_size=4),
        files=st.lists(
            st.builds(
                FileEntry,
                name=file_names,
                bytes=st.integers(0, 2**70),
                checksum=digests,
                ranks=st.lists(st.integers(0, 9)).map(tuple),
            ),
            unique_by=lambda file: file.name,
        ).map(tuple),
        created=st.floats(0, 1e12),
    )
)
def test_any_manifest_is_read_back(written: Manifest) -> None:
    """decode() returns every field of an encoded manifest, including the data position."""
    assert decode(encode(written)) == written


def test_every_damage_to_a_manifest_is_recognised() -> None:
    """decode() refuses every truncation and every flipped bit of a manifest."""
    data = encode(manifest())
    flipped = [
        data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :]
        for i in range(len(data))
        for bit in range(8)
    ]
    for damaged in [*(data[:n] for n in range(len(data))), *flipped, data + b"}"]:
        with pytest.raises(CorruptError):
            decode(damaged)


@given(st.binary(max_size=50) | json_values.map(lambda value: json.dumps(value).encode()))
def test_a_hostile_manifest_is_refused(text: bytes) -> None:
    """For other text, also with a correct checksum, decode() raises only CorruptError."""
    for data in (text, envelope(text)):
        with pytest.raises(CorruptError):
            decode(data)


def without(field: str) -> bytes:
    fields = json.loads(msgspec.json.encode(manifest()))
    del fields[field]
    return json.dumps(fields).encode()


def with_file(name: str, **changes: object) -> bytes:
    file = {"name": name, "bytes": 1, "checksum": checksum([]), "ranks": [], **changes}
    fields = json.loads(msgspec.json.encode(manifest()))
    return json.dumps({**fields, "files": [file, *fields["files"]]}).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"format":0,"shards":[]}', "format 0, but this version of Rekindle reads 1"),
        (b"{}", "missing required field `format`"),
        (without("step"), "missing required field `step`"),
        (without("created"), "missing required field `created`"),
        (with_file("../state"), r"lists the file name '../state', which is not allowed"),
        (with_file(".."), "not allowed"),
        (with_file("a/b"), "not allowed"),
        (with_file("a\\b"), "not allowed"),
        (with_file("a\0"), "not allowed"),
        (with_file("a\n"), "not allowed"),
        (with_file(""), "not allowed"),
        (with_file("manifest.json"), "twice"),
        (with_file("state-0.safetensors"), "twice"),
        (with_file("a", bytes=-1), r"`int` >= 0 .*files"),
        (with_file("a", checksum="md5:0"), r"matching regex .*checksum"),
        (with_file("a", mode="x"), "unknown field `mode`"),
        (b'{"format":' + b"9" * 9999 + b"}", "incomplete or is not a manifest"),
        (b'{"format":' + b"[" * 99999 + b"}", "incomplete or is not a manifest"),
    ],
)
def test_a_refused_manifest_says_why(text: bytes, message: str) -> None:
    """An older version, a missing field and an unsafe file name each have their own message."""
    with pytest.raises(CorruptError, match=message):
        decode(envelope(text))


def test_a_manifest_of_a_later_version_is_not_damaged() -> None:
    """A later version is not damage, because a damaged checkpoint may be removed."""
    with pytest.raises(
        NewerFormatError, match="format 2, but this version of Rekindle reads 1"
    ) as caught:
        decode(envelope(b'{"format":2,"shards":[]}'))
    assert not isinstance(caught.value, CorruptError)


@pytest.mark.parametrize(
    "changes",
    [
        {"data_position": {"state": (1, 2)}},
        {"data_position": {"loss": float("nan")}},
        {"data_position": {1: 2}},
        {"data_position": {"bytes": b"x"}},
        {"data_position": {"object": object()}},
        {"data_position": {"text": "\ud800"}},
        {"step": -1},
        {"world_size": 0},
        {"created": float("inf")},
    ],
)
def test_what_would_not_be_read_back_is_not_written(changes: dict[str, object]) -> None:
    """encode() refuses a value that JSON changes or cannot represent."""
    with pytest.raises(CheckpointError, match=r"cannot write|cannot represent"):
        encode(manifest(**changes))
