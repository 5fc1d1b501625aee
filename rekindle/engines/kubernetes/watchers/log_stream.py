"""Follows the output of a pod's container into a file."""

from __future__ import annotations

import fcntl
import math
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import datetime
from itertools import chain
from pathlib import Path

import msgspec

from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.errors import ApiError, MissingObjectError
from rekindle.engines.kubernetes.client.informer import SILENCE_S
from rekindle.engines.kubernetes.client.streams import Stream

PIECE = 1 << 16  # bytes: of a longer line one piece after the other is written
_TAIL = 1 << 22  # of the file's end, in which what has come twice is looked for
# Nodes write their own zone; the server cuts off what is less than a second.
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d) ")


class LogFile:
    """Appends lines, each once, however often they come; everything raises OSError.

    BlockingIOError: another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._handle)
            raise
        self._known = Counter[int]()
        self._in_line = self._skips = False
        self._cut: int | None = None  # where it ends, once something is added

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return os.fstat(self._handle).st_size

    def close(self) -> None:
        """Let others have it."""
        os.close(self._handle)

    def resume(self, at: int | None = None) -> str:
        """Cut off a line that broke off; return the time from which lines are wanted again.

        They come again from the beginning of the last second on. "": all are wanted.
        at: go on from there, where a line begins; what is behind is cut off when one is added.
        """
        self._known.clear()
        self._in_line = False
        self._cut = at
        end = self.size if at is None else at
        begin = max(0, end - _TAIL)
        tail = os.pread(self._handle, end - begin, begin)
        whole = tail.rfind(b"\n") + 1
        if at is None:
            os.ftruncate(self._handle, begin + whole)
        lines = tail[:whole].splitlines(keepends=True)
        times = [_TIME.match(line) for line in lines]
        last = next((time for time in reversed(times) if time), None)
        if last is None:
            return ""
        for line, stamp in zip(lines, times, strict=True):
            if stamp and stamp[1] >= last[1]:
                self._known[_name(line)] += 1
        return (last[1] + last[2]).decode()

    def add(self, piece: bytes) -> None:
        """Take a line, or the next piece of one; the last has its end."""
        if self._cut is not None:
            os.ftruncate(self._handle, self._cut)
            self._cut = None
        if not self._in_line:
            name = _name(piece)
            self._skips = self._known[name] > 0
            self._known[name] -= self._skips
        self._in_line = not piece.endswith(b"\n")
        if not self._skips:
            _write(self._handle, piece)

    def end_line(self) -> None:
        """Take what came last for a whole line: nothing comes after it."""
        if self._in_line:
            self.add(b"\n")


def second_of(line: bytes) -> datetime | None:
    """When it was put out; None: it does not say."""
    time = _TIME.match(line)
    return time and datetime.fromisoformat((time[1] + time[2].replace(b"Z", b"+00:00")).decode())


def _name(line: bytes) -> int:
    """Tell lines apart that begin alike; their times do that already, mostly."""
    return hash(line[:PIECE].rstrip(b"\n"))


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


TAIL_LINES = 500  # of a pod whose output is not streamed
_TAIL_BYTES = 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_LAST_S = 3.0  # for what is there when the job is left
_MOST_PARTS = 64  # one for each time that reading broke off


class Runs(msgspec.Struct, frozen=True):
    """How often a container was started again, whether it runs, and whether it ever will.

    before: when the run that ended last did, by its node's clock.
    """

    restarts: int = 0
    began: bool = False
    runs: bool = False
    is_over: bool = False
    before: datetime | None = None

    @classmethod
    def of(cls, pod: Object, container: str) -> Runs:
        """Read it from the pod's object."""
        status = pod.get("status") or {}
        for each in status.get("containerStatuses") or ():
            if each["name"] == container:
                state = each.get("state") or {}
                last = (each.get("lastState") or {}).get("terminated")
                return cls(
                    restarts=each.get("restartCount", 0),
                    began=bool(state.keys() & {"running", "terminated"} or last),
                    runs="running" in state,
                    is_over=status.get("phase") in ("Succeeded", "Failed"),
                    before=second_of(f"{(last or {}).get('finishedAt')} ".encode()),
                )
        return cls()

    @property
    def ends(self) -> int:
        """How often it has ended."""
        return self.restarts + (self.began and not self.runs)


class Source(msgspec.Struct, frozen=True):
    """A container whose output is wanted: its pod, and where the output is read and written."""

    path: str  # of the pod
    uid: str
    container: str
    file: Path


class _Part(msgspec.Struct, frozen=True):
    """What came by one stream: where it begins in the file, and the time of its first line."""

    begin: int
    first: datetime


class LogStream:
    """Reads a container's output into its file.

    A kubelet gives the output of the run that it has; which one that is, the answer does not say,
    and the server knows it only once the kubelet could tell. So what is read of a run may turn out
    to be the next one's: it is if it begins after the run's end. Then it is put back, and what is
    left of the run that has ended comes before it.

    amiss: takes what is in the way, each time it is.
    """

    def __init__(self, api: Api, source: Source, amiss: Callable[[Exception], None]) -> None:
        self._api = api
        self._source = source
        self._amiss = amiss
        self._ended = threading.Event()
        self._stream: Stream | None = None
        self._following: Runs | None = None  # while it is read
        self._first: datetime | None = None  # when the first line was put out of what is read
        self._parts = deque[_Part](maxlen=_MOST_PARTS)  # of the run that is, or was last, followed
        self._restarts = 0  # that run's
        self._size = 0  # of the file, when it was let go of

    def end(self) -> None:
        """Have follow() read what is there, and return; from another thread."""
        self._ended.set()
        if self._stream is not None:
            self._stream.break_off()

    def see(self, runs: Runs) -> None:
        """Take how the container is; from another thread."""
        following, stream = self._following, self._stream
        if following is None or stream is None or runs.restarts <= following.restarts:
            return
        first = self._first
        if first is None or runs.before is None or first >= runs.before:
            self._following = None
            stream.break_off()  # else it is the ended run's, and ends where that did

    def follow(self) -> None:
        """Read until the pod is over or gone, or end() is called."""
        pause_s = _FIRST_PAUSE_S
        while not self._ended.is_set():
            try:
                with self._open() as file:
                    while not self._ended.is_set():
                        before = file.size
                        if self._pass(file):
                            return
                        pause_s = _FIRST_PAUSE_S if file.size > before else pause_s
                        self._ended.wait(pause_s)
                        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    self._read(file, most_s=_LAST_S)
            except (ApiError, OSError) as error:
                if self._ended.is_set():
                    return
                self._amiss(error)
                self._ended.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def tail(self, runs: Runs) -> None:
        """Read the end of what a container has put out that has ended. Raises ApiError, OSError."""
        with closing(LogFile(self._source.file)) as file:
            self._read(file, previous=runs.runs, most=_TAIL_BYTES, tailLines=TAIL_LINES)
            file.end_line()

    @contextmanager
    def _open(self) -> Iterator[LogFile]:
        with closing(LogFile(self._source.file)) as file:
            if file.size != self._size:  # another process has written it meanwhile
                self._parts.clear()
            try:
                yield file
            finally:
                self._size = file.size

    def _pass(self, file: LogFile) -> bool:
        """Read on from where the file ends; return whether nothing more can come."""
        runs = self._look()
        if runs is None:
            return True
        if not runs.began:
            return False
        if runs.restarts:  # what it had put out before it was started again
            self._read_before(file, runs)
        if not runs.is_over:
            self._follow(file, runs)
            return False
        self._read(file)
        file.end_line()
        return True

    def _look(self) -> Runs | None:
        """Ask how the container is; None: its pod is gone."""
        try:
            pod = self._api.get(self._source.path)
        except MissingObjectError:
            return None
        if pod["metadata"]["uid"] != self._source.uid:
            return None
        return Runs.of(pod, self._source.container)

    def _follow(self, file: LogFile, runs: Runs) -> None:
        """Read on while the container runs, if it is still that run as far as the server knows."""
        since = file.resume()
        if self._restarts != runs.restarts:
            self._restarts = runs.restarts
            self._parts.clear()
        begin, self._first = file.size, None
        with self._ask(since, follow="true") as stream:
            self._stream, self._following = stream, runs
            try:
                if self._ended.is_set() or self._look() != runs:
                    return
                for piece in stream.pieces(PIECE):
                    if self._first is None and (first := second_of(piece)):
                        self._first = first
                        self._parts.append(_Part(begin, first))
                    file.add(piece)
            except ApiError:
                if self._following is not None:  # see() has not broken it off
                    raise
            finally:
                self._following = None

    def _read_before(self, file: LogFile, runs: Runs) -> None:
        """Read what is left of the run before, to stand before what is there of this one."""
        part = next((each for each in self._parts if self._is_later(each, runs)), None)
        if part is None or not self._put_before(file, part, runs):
            self._read(file, previous=True)
        file.end_line()

    def _is_later(self, part: _Part, runs: Runs) -> bool:
        """Whether a part may be of the newest run, though it was read as of one before."""
        if runs.before is None or runs.restarts <= self._restarts:
            return False
        if runs.restarts == self._restarts + 1:  # the server still has the one that was read
            return part.first >= runs.before
        return part.first > runs.before

    def _put_before(self, file: LogFile, part: _Part, runs: Runs) -> bool:
        """Read the run before in the place of a part, which then comes again; or return False."""
        with self._ask(file.resume(part.begin), previous="true") as stream:
            pieces = stream.pieces(PIECE)
            first = next(pieces, b"")
            second = second_of(first)
            if second is None or runs.before is None or second > runs.before:
                return False  # nothing, or of a run that the server does not know of yet
            for piece in chain((first,), pieces):
                file.add(piece)
        return True

    def _read(
        self,
        file: LogFile,
        *,
        previous: bool = False,
        most: float = math.inf,
        most_s: float = math.inf,
        **query: object,
    ) -> None:
        """Read what there is of the output of one run, which the file has a part of."""
        silence_s, until = min(SILENCE_S, most_s), time.monotonic() + most_s
        query["previous"] = "true" if previous else ""
        with self._ask(file.resume(), silence_s=silence_s, **query) as stream:
            for piece in stream.pieces(PIECE):
                file.add(piece)
                most -= len(piece)
                if most <= 0 or time.monotonic() > until:
                    return

    def _ask(
        self, since: str, *, silence_s: float = SILENCE_S, **query: object
    ) -> AbstractContextManager[Stream]:
        query |= {"container": self._source.container, "timestamps": "true", "sinceTime": since}
        return self._api.stream(f"{self._source.path}/log", silence_s=silence_s, **query)
