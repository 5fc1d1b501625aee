"""A file of fault entries in TOML, each with the line where it stands.

TOML, and not YAML, which takes a bare code for a number (`01000017` even for one in octal). Readers
of TOML tell no lines. They are found by reading ever longer beginnings of the text: a beginning
that ends inside a string or an array is not valid TOML, so comments, blank lines and strings of
many lines cannot mislead.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from rekindle.errors import UsageError
from rekindle.settings import metas
from rekindle.user_file import Place, place_of, text_of

T = TypeVar("T", bound=msgspec.Struct)

_HEADER = re.compile(r"\s*\[\[\s*([A-Za-z0-9_-]+)\s*\]\]\s*(#.*)?$")
_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_QUOTED = re.compile(r"`(.*)`$")
_SHOWN = 60  # characters of a wrong value

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

    def error(self, problem: str, place: Place = ()) -> UsageError:
        """Make the error about this entry, one of its keys, or an element of that key's array."""
        known = bool(place) and place[0] in self.values
        return UsageError(f"{self.path}:{self.line_of(*place) if known else self.line}: {problem}")

    def line_of(self, key: str | int, index: str | int | None = None) -> int:
        """Find the line where `key` begins, or where element `index` of its array stands."""

        def found(document: dict[str, Any]) -> bool:
            values = document.get(self.table, [{}])[0]
            return key in values and (not isinstance(index, int) or len(values[key]) > index)

        return self.line + _lines_until(self.text, found) - 1

    def convert(self, row: type[T]) -> T:
        """Make a row of the values. Raises UsageError: the entry is wrong."""
        try:
            return msgspec.convert(self.values, row, dec_hook=_of_text)
        except msgspec.ValidationError as error:
            problem, place = place_of(error)
            hints = {field.name: field.type for field in msgspec.structs.fields(row)}
            if error.__cause__ is not None:  # a check of ours, whose text has what is right
                problem = f"{place[0]}: {problem}" if place else problem
            elif place:
                problem = self._explained(problem, place, hints[str(place[0])])
            else:  # a key that is missing or not known
                place = tuple(_QUOTED.findall(problem))
                problem = f"{problem}; [[{self.table}]] may have {', '.join(hints)}"
            raise self.error(problem, place) from error

    def _explained(self, problem: str, place: Place, hint: Any) -> str:
        """Add the value that msgspec refuses, and the right ones, to its problem."""
        key, *index = place
        value: Any = self.values
        for step in place:
            value = value[step]
        found = f"{key} {'has' if index else 'is'} {repr(value)[:_SHOWN]}"
        if choices := _choices(hint):
            return f"{found}; choose of {', '.join(choices)}"
        wanted = [f"; give {meta.description}" for meta in metas(hint) if meta.description]
        return f"{found}: {problem}{''.join(wanted)}"


def _of_text(kind: Callable[[str], Any], value: object) -> Any:
    """Make a value of a type that msgspec does not know, which is one that a text makes."""
    if not isinstance(value, str):
        raise TypeError(f"Expected `str`, got `{type(value).__name__}`")
    return kind(value)


def _choices(hint: Any) -> list[str]:
    """List the values of the enum or the literals in a type hint."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [choice.value for choice in hint]
    return [choice for each in get_args(hint) for choice in _choices(each)]


def read(path: Path) -> list[Entry]:
    """Read the entries of a file, in their order.

    Raises UsageError: the file cannot be read, is no TOML in UTF-8, or is not made of `[[table]]`s.
    """
    text = text_of(path, "TOML file")
    try:
        msgspec.toml.decode(text)
    except _UNREADABLE as error:
        problem = str(error)
        line = _line_of(error, text)
        raise UsageError(f"{path}:{line}: no valid TOML: {_PLACE.sub('', problem)}") from error
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


def _line_of(error: Exception, text: str) -> int:
    """Find the line of an error: where its text has it, or where the same error begins."""
    if place := _PLACE.search(str(error)):
        return int(place[1] or text.rstrip("\n").count("\n") + 1)
    lines = text.split("\n")
    for count in range(1, len(lines)):
        try:
            msgspec.toml.decode("\n".join(lines[:count]))
        except _UNREADABLE as other:
            if type(other) is type(error):
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
