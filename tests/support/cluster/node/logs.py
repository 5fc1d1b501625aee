"""Logs of containers: one file for each run, with a time before each line."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from cluster import clock


def file_of(folder: Path, container: str, run: int) -> Path:
    return folder / "logs" / f"{container}-{run}.log"


class Writer:
    """Write complete lines from the pieces of an output."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._rest = b""

    def write(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if lines:
            before = clock.micro().encode() + b" "
            self._file.write(b"".join(before + line + b"\n" for line in lines))

    def close(self) -> None:
        if self._rest:
            self.write(b"\n")
        self._file.close()


class Pipe:
    """A pipe that writes the output of a container's processes to its log, line by line.

    With a pipe of asyncio, the end of a process would be reported only once all processes have
    closed the pipe.
    """

    def __init__(self, path: Path) -> None:
        self._writer = Writer(path)
        self._mine, self.end = os.pipe()
        os.set_blocking(self._mine, False)
        asyncio.get_running_loop().add_reader(self._mine, self._read)

    def close(self) -> None:
        """Read the remaining output and close the pipe.

        Call this after the last process has ended.
        """
        if self._mine >= 0:
            os.close(self.end)
            self._read()
            asyncio.get_running_loop().remove_reader(self._mine)
            os.close(self._mine)
            self._mine = -1
            self._writer.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._mine, 65536):
                self._writer.write(piece)


class Wanted(msgspec.Struct, frozen=True):
    """The part of a log that a request asks for."""

    follow: bool
    timestamps: bool
    previous: bool
    tail: int | None
    since: datetime.datetime | None
    limit: int | None

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Wanted:
        def flag(name: str) -> bool:
            return query.get(name, "").lower() in ("1", "true")

        since = None
        if "sinceSeconds" in query:
            since = clock.now() - datetime.timedelta(seconds=int(query["sinceSeconds"]))
        elif "sinceTime" in query:
            since = clock.read(query["sinceTime"])
        return cls(
            follow=flag("follow"),
            timestamps=flag("timestamps"),
            previous=flag("previous"),
            tail=int(query["tailLines"]) if "tailLines" in query else None,
            since=since,
            limit=int(query["limitBytes"]) if "limitBytes" in query else None,
        )


async def read(path: Path, wanted: Wanted, ended: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield the existing lines, and with `follow` also new lines until the container has ended."""
    left = wanted.limit
    first, rest, place = True, b"", 0
    while True:
        is_last = ended.is_set() or not wanted.follow
        data = b""
        if path.exists():
            with path.open("rb") as file:
                file.seek(place)
                data = file.read()
                place = file.tell()
        *lines, rest = (rest + data).split(b"\n")
        lines = [line for line in lines if _is_new(line, wanted.since)]
        if first and wanted.tail is not None:
            lines = lines[len(lines) - wanted.tail :] if wanted.tail else []
        first = False
        for line in lines:
            shown = (line if wanted.timestamps else line.partition(b" ")[2]) + b"\n"
            if left is not None:
                shown = shown[:left]
                left -= len(shown)
            if shown:
                yield shown
        if is_last or left == 0:
            return
        if not lines:
            await asyncio.sleep(0.03)


def last_of(path: Path, lines: int = 80, limit: int = 2048) -> str:
    """Return the end of a log, as FallbackToLogsOnError does."""
    if not path.exists():
        return ""
    found = [line.partition(b" ")[2] for line in path.read_bytes().split(b"\n") if line]
    return (b"\n".join(found[-lines:])[-limit:]).decode(errors="replace")


def _is_new(line: bytes, since: datetime.datetime | None) -> bool:
    return since is None or clock.read(line.partition(b" ")[0].decode()) >= since
