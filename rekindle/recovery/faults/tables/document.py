"""A file of fault entries in TOML, each with the line where it stands.

TOML, and not YAML, which takes a bare code for a number (`01000017` even for one in octal). Readers
of TOML tell no lines. They are found by reading ever longer beginnings of the text: a beginning
that ends inside a string or an array is not valid TOML, so comments, blank lines and strings of
many lines cannot mislead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rekindle.errors import UsageError
from rekindle.user_file import text_of

_HEADER = re.compile(r"\s*\[\[\s*([A-Za-z0-9_-]+)\s*\]\]\s*(#.*)?$")
_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")

# What may end a beginning that was cut inside an array or a string of many lines.
_CLOSINGS = ("", "\n]", '\n"""', "\n'''")

# A number of too many digits is a plain ValueError, deep nesting a RecursionError.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


class Entry(msgspec.Struct, frozen=True):
    """One `[[table]]` of a file: `text` is its lines, and `line` (from 1) that of its header."""

    path: Path
    table: str
    line: int
    text: str
    values: dict[str, Any]

    def error(self, problem: str, key: str = "", index: int | None = None) -> UsageError:
        """Make the error about this entry, its `key`, or the key's element number `index`."""
        line = self.line_of(key, index) if key else self.line
        return UsageError(f"{self.path}:{line}: {problem}")

    def line_of(self, key: str, index: int | None = None) -> int:
        """Find the line where `key` begins, or where element `index` of its array stands."""

        def found(document: dict[str, Any]) -> bool:
            values = document.get(self.table, [{}])[0]
            return key in values and (index is None or len(values[key]) > index)

        return self.line + _lines_until(self.text, found) - 1


def read(path: Path) -> list[Entry]:
    """Read the entries of a file, in their order.

    Raises UsageError: the file cannot be read, is no TOML in UTF-8, or is not made of `[[table]]`s.
    """
    text = text_of(path, "TOML file")
    if _parsed(text) is None:
        raise _no_toml(path, text)
    return [_entry(path, line, chunk) for line, chunk in _chunks(path, text)]


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = msgspec.toml.decode(text)
    except _UNREADABLE:
        return None
    return document


def _lines_until(text: str, found: Callable[[dict[str, Any]], bool]) -> int:
    """Count the lines of the shortest beginning of `text` of which `found` is true."""
    lines = text.split("\n")
    for count in range(1, len(lines)):
        beginning = "\n".join(lines[:count])
        if any(found(_parsed(beginning + closing) or {}) for closing in _CLOSINGS):
            return count
    return len(lines)


def _no_toml(path: Path, text: str) -> UsageError:
    try:
        msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        said = str(error)
        place = _PLACE.search(said)
        line = place[1] if place and place[1] else text.rstrip("\n").count("\n") + 1
        return UsageError(f"{path}:{line}: no valid TOML: {_PLACE.sub('', said)}")
    except _UNREADABLE as error:
        return UsageError(f"{path}:{_line_of(type(error), text)}: no usable TOML: {error}")
    raise AssertionError("called for a text that can be read")


def _line_of(kind: type[Exception], text: str) -> int:
    """Find the line after which reading fails with an error of just this kind."""
    lines = text.split("\n")
    for count in range(1, len(lines)):
        try:
            msgspec.toml.decode("\n".join(lines[:count]))
        except _UNREADABLE as error:
            if type(error) is kind:
                return count
    return len(lines)


def _chunks(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Cut before each header: each piece with the number of its first line, from 1."""
    lines = text.split("\n")
    starts = [0]
    for number, line in enumerate(lines):
        # A line like a header is one, if all before it is complete.
        if number and line.lstrip().startswith("["):
            if _parsed("\n".join(lines[starts[-1] : number])) is not None:
                starts.append(number)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        chunk = "\n".join(lines[start:end])
        if start or lines[0].lstrip().startswith("["):
            yield start + 1, chunk
        elif preamble := _parsed(chunk):
            key = next(iter(preamble))
            first = _lines_until(chunk, bool)
            raise UsageError(f"{path}:{first}: '{key}' is outside of an entry: give it a [[table]]")


def _entry(path: Path, line: int, chunk: str) -> Entry:
    first = chunk.split("\n", 1)[0]
    header = _HEADER.match(first)
    if header is None:
        raise UsageError(f"{path}:{line}: {first.strip()}: an entry begins with [[table]]")
    table = header[1]
    return Entry(path, table, line, chunk, (_parsed(chunk) or {})[table][0])
