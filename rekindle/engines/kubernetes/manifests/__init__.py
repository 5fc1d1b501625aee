"""Render a job's objects for a cluster, as plain dictionaries. Pure."""

from typing import Any

Manifest = dict[str, Any]


def given(fields: Manifest) -> Manifest:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value}
