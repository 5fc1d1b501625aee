"""Follow the output of a pod's container into a file.

The file gets every line that the server still has. A line may appear twice where a stream broke
off.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.api_errors import ApiError, MissingObjectError
from rekindle.engines.kubernetes.client.informer import SILENCE_S
from rekindle.engines.kubernetes.client.streams import Stream

PIECE = 1 << 16  # bytes of a line that one write takes
TAIL = 1 << 20  # bytes at the file's end in which repeated lines are recognised
# A node writes the time in its own zone, with up to nine digits after the second.
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d) ")
_OVERLAP = timedelta(seconds=1)  # the server compares seconds, and lines may be out of order

_Time = tuple[datetime, bytes]  # the second, and the digits after it
TAIL_LINES = 500  # lines of a pod without a stream
_TAIL_BYTES = 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_LAST_S = 3.0  # for the present lines, when the process leaves the job
_GONE = 400  # the status if the node has removed the output of a run


class LogFile:
    """Appends the lines of streams to a file. Every method may raise OSError.

    Raises BlockingIOError: another process writes the file.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._handle)
            raise
        self._last: _Time | None = None  # until the stream reaches it: earlier lines are known
        self._known = Counter[bytes]()  # number of expected repetitions of each line
        self._in_line = self._skips = False

    @property
    def size(self) -> int:
        """Return the number of bytes in the file."""
        return os.fstat(self._handle).st_size

    def close(self) -> None:
        """Release the file for other processes."""
        os.close(self._handle)

    def resume(self, before: datetime | None = None) -> str:
        """Prepare for the next stream. Return the `sinceTime` to request; "" requests all lines.

        The result follows from the last line in the file, or the last line older than `before`.
        """
        tail = os.pread(self._handle, TAIL, max(0, self.size - TAIL))
        if tail and not tail.endswith(b"\n"):
            _write(self._handle, b"\n")  # the last line is incomplete
        self._in_line = False
        lines = [(line[:PIECE], _time(line)) for line in tail.removesuffix(b"\n").split(b"\n")]
        times = [time for _, time in lines if time and (before is None or time[0] < before)]
        self._last = times[-1] if times else None
        since = times[-1][0] - _OVERLAP if times else None
        self._known = Counter(
            line for line, time in lines if not (since and time and time[0] < since)
        )
        return since.isoformat() if since else ""

    def add(self, piece: bytes) -> None:
        """Take a line of the stream, or the next piece of one. The last piece has the line end."""
        if not self._in_line:
            self._skips = self._comes_again(piece.removesuffix(b"\n"))
        self._in_line = not piece.endswith(b"\n")
        if not self._skips:
            _write(self._handle, piece)

    def _comes_again(self, line: bytes) -> bool:
        """Return whether the file already has a line of the stream."""
        time = _time(line)
        if self._last and time and time < self._last:
            return True
        self._last = None
        if self._known[line] == 0:
            return False
        self._known[line] -= 1
        return True


def _time(line: bytes) -> _Time | None:
    found = _TIME.match(line)
    if found is None:
        return None
    text = (found[1] + found[3].replace(b"Z", b"+00:00")).decode()
    return datetime.fromisoformat(text), found[2] or b""


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


class Runs(msgspec.Struct, frozen=True):
    """The number of restarts of a container, whether it runs, and whether its pod is over.

    before: the second in which the previous run ended, by the node's clock.
    """

    restarts: int = 0
    began: bool = False
    runs: bool = False
    is_over: bool = False
    before: datetime | None = None

    @classmethod
    def of(cls, pod: Object, container: str) -> Runs:
        """Read the state from the pod's object."""
        status = pod.get("status") or {}
        for each in status.get("containerStatuses") or ():
            if each["name"] == container:
                state = each.get("state") or {}
                last = (each.get("lastState") or {}).get("terminated")
                ended = _time(f"{(last or {}).get('finishedAt')} ".encode())
                return cls(
                    restarts=each.get("restartCount", 0),
                    began=bool(state.keys() & {"running", "terminated"} or last),
                    runs="running" in state,
                    is_over=status.get("phase") in ("Succeeded", "Failed"),
                    before=ended[0] if ended else None,
                )
        return cls()

    @property
    def ends(self) -> int:
        """Return the number of ended runs."""
        return self.restarts + (self.began and not self.runs)


class Source(msgspec.Struct, frozen=True):
    """A container whose output is wanted: its pod, and the file for the output."""

    path: str  # of the pod
    uid: str
    container: str
    file: Path


class LogStream:
    """Reads a container's output into its file.

    A kubelet streams the output of the present run, and no answer names the run. The server learns
    of the next run a moment later. So lines of that run may be in the file already before the rest
    of the previous run.

    The function `amiss` takes each error.
    """

    def __init__(self, api: Api, source: Source, amiss: Callable[[Exception], None]) -> None:
        self._api = api
        self._source = source
        self._amiss = amiss
        self._ended = threading.Event()
        self._until = 0.0  # latest time of the end, after end()
        self._stream: Stream | None = None  # while it is followed
        self._restarts = 0  # restarts before the followed run
        self._restarts_seen = 0  # of the pod

    def end(self) -> None:
        """Make follow() read the present lines and return; from another thread."""
        self._until = time.monotonic() + _LAST_S
        self._ended.set()
        self._break_off()

    def see(self, runs: Runs) -> None:
        """Record the state of the container; from another thread."""
        self._restarts_seen = runs.restarts
        self._break_off()

    def _break_off(self) -> None:
        """End the followed stream, if it must end."""
        stream = self._stream
        if stream is not None and self._is_to_break_off():
            stream.break_off()

    def follow(self) -> None:
        """Read until the pod is over or gone, or end() is called."""
        pause_s = _FIRST_PAUSE_S
        while not self._ended.is_set():
            try:
                with closing(LogFile(self._source.file)) as file:
                    while not self._ended.is_set():
                        before = file.size
                        if self._pass(file):
                            return
                        pause_s = _FIRST_PAUSE_S if file.size > before else pause_s
                        self._ended.wait(pause_s)
                        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    self._read(file)
            except (ApiError, OSError) as error:
                self._amiss(error)
                self._ended.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def tail(self, runs: Runs) -> None:
        """Read the last lines of a container that has ended. Raises ApiError, OSError."""
        with closing(LogFile(self._source.file)) as file:
            previous = "true" if runs.runs else ""
            self._read(file, previous=previous, tailLines=TAIL_LINES, limitBytes=_TAIL_BYTES)

    def _pass(self, file: LogFile) -> bool:
        """Read from the end of the file. Return whether no more lines can follow."""
        runs = self._look()
        if runs is None:
            return True
        if not runs.began:
            return False
        if runs.restarts > self._restarts:
            self._read_previous(file, runs)
            self._restarts = runs.restarts
        if runs.is_over:
            self._read(file)
        else:
            self._follow(file)
        return runs.is_over

    def _look(self) -> Runs | None:
        """Request the state of the container. None: its pod is gone."""
        try:
            pod = self._api.get(self._source.path)
        except MissingObjectError:
            return None
        if pod["metadata"]["uid"] != self._source.uid:
            return None
        return Runs.of(pod, self._source.container)

    def _follow(self, file: LogFile) -> None:
        """Read while the container runs, until the server reports a restart."""
        with self._ask(file.resume(), follow="true") as stream:
            self._stream = stream
            try:
                if not self._is_to_break_off():
                    for piece in stream.pieces(PIECE):
                        file.add(piece)
            except ApiError:
                if not self._is_to_break_off():
                    raise
            finally:
                self._stream = None

    def _is_to_break_off(self) -> bool:
        return self._ended.is_set() or self._restarts_seen > self._restarts

    def _read_previous(self, file: LogFile, runs: Runs) -> None:
        """Read the rest of the previous run, unless its node has removed the output."""
        try:
            self._read(file, runs.before, previous="true")
        except ApiError as error:
            if error.status != _GONE:
                raise

    def _read(self, file: LogFile, before: datetime | None = None, **query: object) -> None:
        """Read the present lines of one run."""
        with self._ask(file.resume(before), **query) as stream:
            for piece in stream.pieces(PIECE):
                file.add(piece)
                if self._ended.is_set() and time.monotonic() > self._until:
                    return

    def _ask(self, since: str, **query: object) -> AbstractContextManager[Stream]:
        query |= {"container": self._source.container, "timestamps": "true", "sinceTime": since}
        silence_s = _LAST_S if self._ended.is_set() else SILENCE_S
        return self._api.stream(f"{self._source.path}/log", silence_s=silence_s, **query)
