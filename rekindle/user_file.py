"""Read a file that a person writes, and find the place of an error in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeAlias

import msgspec

from rekindle.errors import UsageError

Place: TypeAlias = tuple[str | int, ...]  # the keys and numbers that lead to a value

_LARGEST = 1 << 20  # bytes; a larger file is probably not the file that the user means
_PATH = re.compile(r" - at `\$([^`]*)`$")  # the form in which msgspec writes a path
_STEP = re.compile(r"\.([\w-]+)|\[(\d+)\]")


class FieldError(ValueError):
    """A struct's `__post_init__` refuses a value. place: of the value in the struct."""

    def __init__(self, problem: str, *place: str | int) -> None:
        super().__init__(problem)
        self.place: Place = place


def text_of(path: Path, kind: str) -> str:
    """Read a file of a kind ("job file").

    Raises UsageError: the file cannot be read, is larger than 1 MiB, or is not text in UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{path}: cannot be read ({reason}); give the path of a {kind}") from error
    if len(content) > _LARGEST:
        raise UsageError(f"{path}: larger than 1 MiB; give the path of a {kind}")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8; save the file in UTF-8") from error


def place_of(error: msgspec.ValidationError) -> tuple[str, Place]:
    """Return the problem and its place; msgspec writes both in one text."""
    text = str(error)
    path = "".join(_PATH.findall(text))
    steps = (key or int(index) for key, index in _STEP.findall(path))
    inner = error.__cause__.place if isinstance(error.__cause__, FieldError) else ()
    return _PATH.sub("", text), (*steps, *inner)
