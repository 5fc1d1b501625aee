"""The schema of all messages between coordinator, agents and ranks, and its record.

`PYTHONPATH=tests/support python -m wire_schema` writes the record again. It refuses to do so while
`WIRE_VERSION` is that of the record, because agents of the old version would then be accepted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from repository import ROOT

from rekindle.job.spec import JobSpec
from rekindle.names import WIRE_VERSION
from rekindle.protocol.agent import FromAgent, FromRank, ToAgent, ToRank

RECORD = ROOT / "tests" / "unit" / "protocol" / "wire_schema.txt"

# JobSpec: a machine that joins gets it from `GET /spec`.
_ROOTS = {
    "from an agent": FromAgent,
    "to an agent": ToAgent,
    "from a rank": FromRank,
    "to a rank": ToRank,
    "GET /spec": JobSpec,
}
_NOT_SENT = ("default", "description", "title")  # a sender sends each field


def schema() -> list[str]:
    """Return a line for each direction, for each type, and for each field of a type."""
    roots, types = msgspec.json.schema_components(_ROOTS.values())
    lines = [f"{name}: {_plain(root)}" for name, root in zip(_ROOTS, roots, strict=True)]
    for name, described in sorted(types.items()):
        fields = described.pop("properties", {})
        required = described.pop("required", [])
        lines.append(f"{name}: {_plain(described)}")
        for field, kind in fields.items():
            optional = "" if field in required else ", optional"
            lines.append(f"{name}.{field}: {_plain(kind)}{optional}")
    return lines


def recorded(path: Path = RECORD) -> tuple[int, list[str]]:
    """Return the version and the lines of a record."""
    first, *lines = path.read_text().splitlines()
    return int(first.removeprefix("WIRE_VERSION = ")), lines


def write(path: Path = RECORD, version: int = WIRE_VERSION) -> None:
    """Record the schema. Raises ValueError: it has changed, and the version has not."""
    lines = schema()
    if path.exists() and recorded(path)[0] >= version and recorded(path)[1] != lines:
        raise ValueError(f"raise WIRE_VERSION in rekindle/names.py first; {version} is recorded")
    path.write_text("\n".join([f"WIRE_VERSION = {version}", *lines]) + "\n")


def _plain(described: Any) -> str:
    return json.dumps(_sent(described), sort_keys=True)


def _sent(described: Any) -> Any:
    """Return a part of a JSON schema without what does not change the message."""
    if isinstance(described, dict):
        kept = described.items()
        return {name: _sent(each) for name, each in kept if name not in _NOT_SENT}
    return [_sent(each) for each in described] if isinstance(described, list) else described


def main() -> None:
    """Write the record, or state why not."""
    try:
        write()
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
