"""A pointer: one small text beside stores of checkpoints that is replaced now and then, as a whole.

Whoever replaces it says what it held when they decided to: of two who do so at once, one is refused
and decides again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rekindle.checkpoints.files import (
    explained,
    locked,
    make_directories,
    opened_directory,
    sync_directory,
    write_file,
)


class Pointer(Protocol):
    """Where the text is. Every method raises CheckpointError: it cannot be read, or written."""

    @property
    def location(self) -> str:
        """As people and tools name it."""

    def read(self) -> bytes | None:
        """The text; None: there is none."""

    def replace(self, data: bytes, old: bytes | None) -> bool:
        """Write the text; False, and it is left as it is, unless it is still `old`."""


class FilePointer:
    """A pointer that is a file; who reads it sees the old or the new text, never a part."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def location(self) -> str:
        """Its absolute path."""
        return str(self._path)

    def read(self) -> bytes | None:
        """The text; None: there is none."""
        with explained("read", self._path):
            try:
                return self._path.read_bytes()
            except FileNotFoundError:
                return None

    def replace(self, data: bytes, old: bytes | None) -> bool:
        """Write the text; False, and it is left as it is, unless it is still `old`."""
        with explained("write", self._path):
            make_directories(self._path.parent)
            with locked(self._path.parent):
                if self.read() != old:
                    return False
                new = self._path.with_name(f".{self._path.name}.new")
                new.unlink(missing_ok=True)  # of a writer that was killed
                with opened_directory(new.parent) as directory:
                    write_file(directory, new.name, [data])
                new.replace(self._path)
                sync_directory(new.parent)
                return True
