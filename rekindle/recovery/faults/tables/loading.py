"""Combine the shipped tables and a user's file into one set of rows, by their keys."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from rekindle.errors import UsageError
from rekindle.recovery.faults.tables.document import Entry, read
from rekindle.recovery.faults.tables.keys import Key
from rekindle.recovery.faults.tables.rows import (
    AscendRow,
    ConditionRow,
    DurationRow,
    ExitRow,
    FrequencyRow,
    LevelRow,
    PatternRow,
    ReasonRow,
    XidRow,
)

_TYPES: Final[dict[str, Any]] = {
    "ascend": AscendRow,
    "xid": XidRow,
    "kernel": PatternRow,
    "text": PatternRow,
    "exit": ExitRow,
    "node_condition": ConditionRow,
    "pod_reason": ReasonRow,
    "frequency": FrequencyRow,
    "duration": DurationRow,
}
_LEVEL_SOURCES = {"ascend": "ascend", "frequency": "ascend", "duration": "ascend", "xid": "xid"}
_LEVELS = ("ascend_levels.toml", "xid_levels.toml")
_SHIPPED = (
    "ascend.toml",
    "ascend_chips.toml",
    "ascend_chips_26_1.toml",
    "ascend_escalation.toml",
    "ascend_nodes.toml",
    "ascend_public.toml",
    "ascend_switches.toml",
    "xid.toml",
    "kernel.toml",
    "texts.toml",
    "exits.toml",
    "kubernetes_nodes.toml",
    "kubernetes_pods.toml",
)
SHIPPED = Path(__file__).parent / "data"

Levels = dict[tuple[str, str], LevelRow]


class Rows(msgspec.Struct, frozen=True):
    """Hold the entries of all tables: `by_key[table][key]`; the user's entries have priority.

    `own_texts` holds the user's entries of the table `text`.
    """

    levels: Levels
    by_key: dict[str, dict[Any, Any]]
    own_texts: dict[Any, Any] = {}


def load(user_file: Path | None) -> Rows:
    """Read the shipped tables and the user's file, if any, which has priority.

    Raises UsageError: the file is invalid; the message names the line.
    """
    shipped = _shipped()
    if user_file is None:
        return shipped
    by_key = _tables(_entries(user_file, _TYPES, shipped.levels))
    own_texts = dict(by_key["text"])
    for table, own in by_key.items():
        for key, row in shipped.by_key[table].items():
            own.setdefault(key, row)
    return Rows(shipped.levels, by_key, own_texts)


@functools.cache
def _shipped() -> Rows:
    levels = {
        key: row
        for name in _LEVELS
        for _, key, row in _entries(SHIPPED / name, {"level": LevelRow}, {})
    }
    entries = (_entries(SHIPPED / name, _TYPES, levels) for name in _SHIPPED)
    return Rows(levels, _tables(itertools.chain.from_iterable(entries)))


def _tables(entries: Iterable[tuple[str, Any, Any]]) -> dict[str, dict[Any, Any]]:
    by_key: dict[str, dict[Any, Any]] = {table: {} for table in _TYPES}
    for table, key, row in entries:
        by_key[table][key] = row
    return by_key


def _entries(path: Path, types: dict[str, Any], levels: Levels) -> Iterator[tuple[str, Any, Any]]:
    """Yield (table, key, row) for every key of every entry of a file. Raises UsageError."""
    entries: dict[tuple[str, Any], tuple[Entry, Key]] = {}
    for entry in read(path):
        table = entry.table
        if table not in types:
            raise entry.error(f"unknown table [[{table}]]; choose from {', '.join(types)}")
        row = entry.convert(types[table])
        if source := _LEVEL_SOURCES.get(table):
            names = [name for of, name in levels if of == source]
            if row.level not in names:
                problem = f"level is {row.level!r}; choose from {', '.join(names)}"
                raise entry.error(problem, ("level",))
        for key in row.found_by():
            if (table, key.key) in entries:
                raise _twice(entry, key, *entries[table, key.key])
            entries[table, key.key] = entry, key
            yield table, key.key, row


def _twice(entry: Entry, key: Key, first: Entry, first_key: Key) -> UsageError:
    line = first.line_of(first_key.field, first_key.element)
    value = entry.values[key.field][key.element]
    return entry.error(f"{value!r} is already in line {line}; keep one", (key.field, key.element))
