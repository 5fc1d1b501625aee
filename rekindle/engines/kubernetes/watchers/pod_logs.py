"""Copy the output of a job's pods into files of the job's directory while a process steers it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rekindle.engines.kubernetes.client.api import FORBIDDEN_S, Api, Object
from rekindle.engines.kubernetes.client.api_errors import ApiError, ForbiddenError
from rekindle.engines.kubernetes.labels import ROLE, Role
from rekindle.engines.kubernetes.watchers.log_stream import LogStream, Runs, Source
from rekindle.waiting import join_all

MOST = 32  # pods with a stream; the coordinator always has one
_FORGOTTEN_S = 60.0  # after that the same error is reported again
_CLOSE_S = 10.0  # for the last lines, when the process leaves the job


class _Pod(msgspec.Struct, eq=False):
    source: Source
    runs: Runs
    stream: LogStream | None = None  # while it is read
    address: str = ""
    waits: bool = False  # its output has no stream yet
    kept: int = 0  # number of ends whose last lines are in the file


class PodLogs:
    """Streams the output of the first pods; of the others it reads the last lines at their end.

    folder: for the files. path: the collection of the pods. container: the agent's name in them.
    """

    def __init__(self, api: Api, folder: Path, path: str, container: str) -> None:
        self._api = api
        self._folder = folder
        self._path = path
        self._container = container
        self._tell: Callable[[str], None] = print
        self._lock = threading.Lock()
        self._ended = False
        self._pods: dict[str, _Pod] = {}  # by uid
        self._files: dict[str, Path] = {}  # by the pods' addresses
        self._waiting: deque[_Pod] = deque()
        self._failed: deque[tuple[_Pod, Runs]] = deque()
        self._streams: dict[threading.Thread, LogStream | None] = {}
        self._amiss: dict[str, tuple[float, float]] = {}  # time of the first and of the last error

    @contextmanager
    def open(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Read until the block ends. tell: takes a sentence for users."""
        self._tell = tell
        try:
            yield
        finally:
            self._close()

    def see(self, pod: Object, there: bool) -> None:
        """Record a new state of a pod."""
        uid = pod["metadata"]["uid"]
        with self._lock:
            known = self._pods.get(uid)
            if known is None:
                known = _Pod(self._source(pod), Runs())
            known.runs = Runs.of(pod, known.source.container)
            if known.stream is not None:
                known.stream.see(known.runs)
            known.address = (pod.get("status") or {}).get("podIP") or known.address
            if not known.runs.began or self._ended:
                return
            if uid not in self._pods:
                self._pods[uid] = known
                self._begin(known, is_first=_is_coordinator(pod))
            if known.waits and known.runs.ends > known.kept:
                known.kept = known.runs.ends
                self._failed.append((known, known.runs))
                if len(self._failed) == 1:
                    self._start(self._keep_last_lines)
            self._files[known.address] = known.source.file
            if not there:
                del self._pods[uid]
                known.waits = False

    def file_of(self, address: str) -> Path | None:
        """Return the output file of the pod that has, or had last, this address."""
        with self._lock:
            file = self._files.get(address)
        return file if file and file.exists() else None

    def _source(self, pod: Object) -> Source:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        container = "coordinator" if _is_coordinator(pod) else self._container
        # A pod that replaces another one may have its name.
        file = self._folder / f"{name}-{uid[:8]}.log"
        return Source(f"{self._path}/{name}", uid, container, file)

    # ---- under the lock

    def _begin(self, pod: _Pod, *, is_first: bool) -> None:
        """Start a stream for its output, or queue the pod for one."""
        if is_first or len(self._streams) < MOST:
            self._start(lambda: self._read(pod))
        else:
            pod.waits = True
            self._waiting.append(pod)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="rekindle-logs", daemon=True)
        self._streams[thread] = None
        thread.start()

    def _next(self) -> _Pod | None:
        while self._waiting and not self._ended:
            pod = self._waiting.popleft()
            if pod.waits:
                pod.waits = False
                return pod
        return None

    # ---- in separate threads

    def _read(self, first: _Pod) -> None:
        pod: _Pod | None = first
        while pod is not None:
            stream = LogStream(self._api, pod.source, self._say)
            with self._lock:
                self._streams[threading.current_thread()] = pod.stream = stream
                if self._ended:
                    stream.end()
            stream.follow()
            with self._lock:
                pod.stream = None
                pod = self._next()
                if pod is None:
                    del self._streams[threading.current_thread()]

    def _keep_last_lines(self) -> None:
        while True:
            with self._lock:
                if self._ended or not self._failed:
                    del self._streams[threading.current_thread()]
                    return
                pod, runs = self._failed[0]
            try:
                LogStream(self._api, pod.source, self._say).tail(runs)
                self._tell(f"the last lines of a pod that has ended are in {pod.source.file}")
            except (ApiError, OSError) as error:
                self._say(error)
            with self._lock:
                self._failed.popleft()

    def _say(self, error: Exception) -> None:
        """Report an error once. Errors that may pass are not reported."""
        forbidden = isinstance(error, ForbiddenError)
        passing = isinstance(error, ApiError) and not forbidden
        if passing or isinstance(error, BlockingIOError):  # another process writes the file
            return
        kind, now = type(error).__name__, time.monotonic()
        with self._lock:
            since, last = self._amiss.get(kind, (now, now))
            if now - last > _FORGOTTEN_S:
                since = now
            # A server that has just restarted refuses all requests for a while.
            is_news = now - since >= (FORBIDDEN_S if forbidden else 0.0)
            self._amiss[kind] = (math.inf if is_news else since, now)
        if is_news:
            self._tell(f"Rekindle cannot store the output of pods: {error}")

    def _close(self) -> None:
        with self._lock:
            self._ended = True
            streams = dict(self._streams)
        for stream in streams.values():
            if stream is not None:
                stream.end()
        join_all(streams, _CLOSE_S)


def _is_coordinator(pod: Object) -> bool:
    return (pod["metadata"].get("labels") or {}).get(ROLE) == Role.COORDINATOR.value
