"""One container's output, read from the API server again and again until it is over."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from rekindle.engines.kubernetes.api import Api, Object
from rekindle.engines.kubernetes.errors import ApiError, MissingObjectError
from rekindle.engines.kubernetes.follow import SILENCE_S
from rekindle.engines.kubernetes.log_file import PIECE, LogFile
from rekindle.engines.kubernetes.streams import Stream

TAIL_LINES = 500  # of a pod whose output is not streamed
_TAIL_BYTES = 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_TOLD_S = 2.0  # for kubelets to tell how their containers are, when the server is there again
_LAST_S = 3.0  # for what is there when the job is left


class Runs(msgspec.Struct, frozen=True):
    """How often a container was started again, whether it runs, and whether it ever will."""

    restarts: int = 0
    began: bool = False
    runs: bool = False
    is_over: bool = False

    @classmethod
    def of(cls, pod: Object, container: str) -> Runs:
        """Read it from the pod's object."""
        status = pod.get("status") or {}
        for each in status.get("containerStatuses") or ():
            if each["name"] == container:
                state, last = each.get("state") or {}, each.get("lastState") or {}
                return cls(
                    restarts=each.get("restartCount", 0),
                    began=bool(state.keys() & {"running", "terminated"} or last.get("terminated")),
                    runs="running" in state,
                    is_over=status.get("phase") in ("Succeeded", "Failed"),
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


class LogStream:
    """Reads a container's output into its file.

    amiss: takes what is in the way, each time it is.
    """

    def __init__(self, api: Api, source: Source, amiss: Callable[[Exception], None]) -> None:
        self._api = api
        self._source = source
        self._amiss = amiss
        self._ended = threading.Event()
        self._stream: Stream | None = None
        self._away = False  # the server was, since the container's state was last sure

    def end(self) -> None:
        """Have follow() read what is there, and return; from another thread."""
        self._ended.set()
        if self._stream is not None:
            self._stream.break_off()

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

    def _pass(self, file: LogFile) -> bool:
        """Read on from where the file ends; return whether nothing more can come."""
        try:
            runs = self._look()
        except ApiError:
            self._away = True
            raise
        if runs is None:
            return True
        if not runs.began:
            return False
        if runs.restarts:  # what it had put out before it was started again
            self._read(file, previous=True)
            file.end_line()
        self._read(file, following=None if runs.is_over else runs)
        if runs.is_over:
            file.end_line()
        return runs.is_over

    def _look(self) -> Runs | None:
        """Ask how the container is; None: its pod is gone."""
        try:
            pod = self._api.get(self._source.path)
        except MissingObjectError:
            return None
        if pod["metadata"]["uid"] != self._source.uid:
            return None
        return Runs.of(pod, self._source.container)

    def _read(
        self,
        file: LogFile,
        *,
        following: Runs | None = None,
        previous: bool = False,
        most: float = math.inf,
        most_s: float = math.inf,
        **query: object,
    ) -> None:
        """Read the output of one run, which the file has a part of.

        following: read on while the container runs, if it is still that run.
        """
        query |= {"container": self._source.container, "timestamps": "true"}
        query |= {"sinceTime": file.resume()}
        if previous:
            query["previous"] = "true"
        if following:
            query["follow"] = "true"
        silence_s, until = min(SILENCE_S, most_s), time.monotonic() + most_s
        with self._api.stream(f"{self._source.path}/log", silence_s=silence_s, **query) as stream:
            if following:
                self._stream = stream
                if self._away:
                    # A kubelet that could not tell may have started the container again meanwhile:
                    # then this is another run, and the rest of the one before comes first.
                    self._ended.wait(_TOLD_S)
                if self._ended.is_set() or self._look() != following:
                    return
                self._away = False
            for piece in stream.pieces(PIECE):
                file.add(piece)
                most -= len(piece)
                if most <= 0 or time.monotonic() > until:
                    return
