"""Read a TOML file of fault entries, each with its line number.

The format is not YAML, because YAML reads a bare code as a number (`01000017` even as octal). TOML
parsers do not return line numbers. This module finds them with parses of ever longer prefixes of
the text. A prefix that ends inside a string or an array is not valid TOML. Therefore comments,
blank lines and multi-line strings cannot cause wrong numbers.
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

# These texts may complete a prefix that ends inside an array or a multi-line string.
_CLOSINGS = ("", "\n]", '\n"""', "\n'''")

# A number with too many digits raises a plain ValueError, deep nesting a RecursionError.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


class Entry(msgspec.Struct, frozen=True):
    """Hold one `[[table]]` of a file: `text` is its lines, `line` is that of its header, from 1."""

    path: Path
    table: str
    line: int
    text: str
    values: dict[str, Any]

    def error(self, problem: str, place: Place = ()) -> UsageError:
        """Return the error about this entry, one of its keys, or an element of that key's array."""
        known = bool(place) and place[0] in self.values
        return UsageError(f"{self.path}:{self.line_of(*place) if known else self.line}: {problem}")

    def line_of(self, key: str | int, index: str | int | None = None) -> int:
        """Return the line where `key` starts, or the line of element `index` of its array."""

        def found(document: dict[str, Any]) -> bool:
            values = document.get(self.table, [{}])[0]
            return key in values and (not isinstance(index, int) or len(values[key]) > index)

        return self.line + _lines_until(self.text, found) - 1

    def convert(self, row: type[T]) -> T:
        """Convert the values into a row. Raises UsageError: the entry is invalid."""
        try:
            return msgspec.convert(self.values, row, dec_hook=_of_text)
        except msgspec.ValidationError as error:
            problem, place = place_of(error)
            hints = {field.name: field.type for field in msgspec.structs.fields(row)}
            if error.__cause__ is not None:  # a check of Rekindle, whose text has the valid values
                problem = f"{place[0]}: {problem}" if place else problem
            elif place:
                problem = self._explained(problem, place, hints[str(place[0])])
            else:  # a key is missing or unknown
                place = tuple(_QUOTED.findall(problem))
                problem = f"{problem}; [[{self.table}]] may have {', '.join(hints)}"
            raise self.error(problem, place) from error

    def _explained(self, problem: str, place: Place, hint: Any) -> str:
        """Add the rejected value and the valid values to the problem of msgspec."""
        key, *index = place
        value: Any = self.values
        for step in place:
            value = value[step]
        found = f"{key} {'has' if index else 'is'} {repr(value)[:_SHOWN]}"
        if choices := _choices(hint):
            return f"{found}; choose from {', '.join(choices)}"
        wanted = [f"; give {meta.description}" for meta in metas(hint) if meta.description]
        return f"{found}: {problem}{''.join(wanted)}"


def _of_text(kind: Callable[[str], Any], value: object) -> Any:
    """Convert a text into a type that msgspec does not support."""
    if not isinstance(value, str):
        raise TypeError(f"Expected `str`, got `{type(value).__name__}`")
    return kind(value)


def _choices(hint: Any) -> list[str]:
    """Return the values of the enum or the literals in a type hint."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [choice.value for choice in hint]
    return [choice for each in get_args(hint) for choice in _choices(each)]


def read(path: Path) -> list[Entry]:
    """Return the entries of a file, in order.

    Raises UsageError: the file is unreadable, is not TOML in UTF-8, or has content outside
    `[[table]]`s.
    """
    text = text_of(path, "TOML file")
    try:
        msgspec.toml.decode(text)
    except _UNREADABLE as error:
        problem = str(error)
        line = _line_of(error, text)
        raise UsageError(f"{path}:{line}: invalid TOML: {_PLACE.sub('', problem)}") from error
    return [_entry(path, line, chunk) for line, chunk in _chunks(path, text)]


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = msgspec.toml.decode(text)
    except _UNREADABLE:
        return None
    return document


def _lines_until(text: str, found: Callable[[dict[str, Any]], bool]) -> int:
    """Return the number of lines of the shortest prefix of `text` for which `found` is true."""
    lines = text.split("\n")
    for count in range(1, len(lines)):
        beginning = "\n".join(lines[:count])
        if any(found(_parsed(beginning + closing) or {}) for closing in _CLOSINGS):
            return count
    return len(lines)


def _line_of(error: Exception, text: str) -> int:
    """Return the line of an error, from its text or from the first prefix with the same error."""
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
    """Yield the pieces of the text between headers, each with its first line number, from 1."""
    lines = text.split("\n")
    starts = [0]
    for number, line in enumerate(lines):
        # A line that looks like a header is one, if the text before it is complete.
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
            raise UsageError(
                f"{path}:{first}: '{key}' is outside of an entry; put it below a [[table]]"
            )


def _entry(path: Path, line: int, chunk: str) -> Entry:
    first = chunk.split("\n", 1)[0]
    header = _HEADER.match(first)
    if header is None:
        raise UsageError(
            f"{path}:{line}: {first.strip()!r} does not begin an entry; write [[table]]"
        )
    table = header[1]
    return Entry(path, table, line, chunk, (_parsed(chunk) or {})[table][0])
