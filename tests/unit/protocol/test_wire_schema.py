"""A change of a message needs another wire version."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import wire_schema

from rekindle.names import WIRE_VERSION


def test_the_messages_are_those_recorded_for_the_wire_version() -> None:
    """Agent and coordinator of one version have the same messages with the same fields."""
    version, lines = wire_schema.recorded()
    changed = set(lines) ^ set(wire_schema.schema())
    assert (version, sorted(changed)) == (WIRE_VERSION, []), (
        "raise WIRE_VERSION in rekindle/names.py, and run "
        "`PYTHONPATH=tests/support python -m wire_schema`"
    )


def test_a_changed_message_is_not_recorded_for_the_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record changes only together with the version; a text or a default is no change."""
    path = tmp_path / "wire_schema.txt"
    fields = [("rank", int), ("why", str, "")]
    for index, (kind, is_changed) in enumerate(
        (
            (msgspec.defstruct("Left", fields), True),
            (msgspec.defstruct("Left", [("rank", int), ("why", str, "x")]), False),
            (msgspec.defstruct("Left", [("rank", int), ("why", str)]), True),
            (msgspec.defstruct("Left", [("rank", float), ("why", str)]), True),
            (msgspec.defstruct("Left", [("rank", float), ("why", str), ("at", float, 0)]), True),
        )
    ):
        monkeypatch.setitem(wire_schema._ROOTS, "to a rank", kind)
        if is_changed and index:
            with pytest.raises(ValueError, match=f"{index} is recorded"):
                wire_schema.write(path, version=index)
        wire_schema.write(path, version=index + 1)
        assert wire_schema.recorded(path) == (index + 1, wire_schema.schema())
