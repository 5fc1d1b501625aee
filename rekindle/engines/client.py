"""Communicate with a job's coordinator over HTTP: read its state, and steer it under a lease.

The client is synchronous and uses `http.client`, so that any process can use it.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec

from rekindle import names
from rekindle.errors import JobError, LeaseHeldError, UnansweredError, UsageError
from rekindle.job.spec import Endpoint, JobSpec, bearer
from rekindle.profiling.switch import ProfilingOrder
from rekindle.protocol.agent import Approval, Inject
from rekindle.protocol.http_views import Drain, JobView
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.journal import journal

# The coordinator sends something every second. A coordinator that is silent for this long is gone.
SILENCE_S = 20.0
_SHOWN = 200  # characters shown of an answer that is not a coordinator's, such as a page of HTML
# Statuses of a proxy that reaches no coordinator.
_ON_THE_WAY = (
    http.HTTPStatus.BAD_GATEWAY,
    http.HTTPStatus.SERVICE_UNAVAILABLE,
    http.HTTPStatus.GATEWAY_TIMEOUT,
)

T = TypeVar("T")


class Answer(Protocol):
    """An answer, read at once or in parts. A broken connection raises OSError or HTTPException."""

    @property
    def status(self) -> int:
        """Return the HTTP status."""

    def read(self) -> bytes:
        """Return the rest of the answer."""

    def readline(self) -> bytes:
        """Return the next line. The last line has no line end, and may be empty."""


class Connection(Protocol):
    """A connection for one request, with the methods of http.client."""

    def request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], /
    ) -> None:
        """Send the request."""

    def getresponse(self) -> Answer:
        """Wait for the start of the answer."""

    def close(self) -> None:
        """Close the connection and the answer."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The route to a coordinator: directly, or through a proxy.

    connect: returns a new connection that is not open yet. where: a short name of the coordinator.
    """

    connect: Callable[[], Connection]
    where: str


def straight(endpoint: Endpoint) -> Transport:
    """Return the route to a coordinator whose address this process can reach."""
    host, port, pid = endpoint.host, endpoint.port, endpoint.pid
    return Transport(
        connect=lambda: http.client.HTTPConnection(host, port, timeout=SILENCE_S),
        where=f"the job's coordinator ({f'process {pid}' if pid else f'{host}:{port}'})",
    )


class JobClient:
    """Sends requests to one coordinator.

    Each request raises JobError: the coordinator does not answer, or refuses.
    """

    def __init__(self, endpoint: Endpoint, secret: str, transport: Transport | None = None) -> None:
        self._transport = transport or straight(endpoint)
        self._headers = {names.HEADER_SECRET: bearer(secret)}

    def status(self) -> JobView:
        """Fetch the state of the job."""
        with self._call("GET", names.PATH_JOB) as call:
            return call.decode(JobView)

    def spec(self) -> tuple[JobSpec, int]:
        """Fetch the job's description, and the number of its attempt."""
        with self._call("GET", names.PATH_SPEC) as call:
            return call.decode(tuple[JobSpec, int])

    def history(self, *, since: int = 0) -> list[journal.AnyEvent]:
        """Fetch the present events with a sequence number above `since`."""
        target = f"{names.PATH_EVENTS}?{urlencode({'since': since, 'follow': 0})}"
        with self._call("GET", target) as call:
            return journal.read(call.read().splitlines())

    def begin(self, attempt: int, history: Sequence[journal.AnyEvent]) -> None:
        """Order a coordinator in a pod to begin an attempt of a job with this history.

        Raises UsageError: the coordinator cannot use the job's tables of faults.
        """
        order = {"attempt": attempt, "journal": journal.encode_all(history).decode()}
        self._post(names.PATH_ATTEMPT, json.dumps(order).encode())

    def events(self, *, since: int = 0) -> EventStream:
        """Follow the job's events with a number above `since`, without steering the job."""
        return self._stream(names.PATH_EVENTS, {"since": since})

    def steer(self, *, holder: str, since: int = 0) -> EventStream:
        """Take the lease and follow the events; the open stream holds the lease.

        Raises LeaseHeldError: another process steers the job; the message names it.
        """
        return self._stream(names.PATH_STEER, {"holder": holder, "since": since})

    def approve(self, answer: Approval) -> None:
        """Answer an incident that waits for a person. Raises JobError: it does not wait."""
        self._post(names.PATH_APPROVE, msgspec.json.encode(answer))

    def report(self, health_event: HealthEvent) -> None:
        """Report a health event of a node to the job.

        Raises JobError: the coordinator refuses it.
        """
        self._post(names.PATH_HEALTH_EVENTS, msgspec.json.encode(health_event))

    def stop(self, *, by: str) -> None:
        """Stop the job for a person, regardless of the process that steers it."""
        self._post(names.PATH_STOP, json.dumps({"by": by}).encode())

    def drain(self, order: Drain) -> None:
        """Move a node to another agent. Raises JobError: the node cannot move."""
        self._post(names.PATH_DRAIN, msgspec.json.encode(order))

    def profile(self, order: ProfilingOrder) -> None:
        """Switch light profiling.

        Raises JobError: the job ends, or these kinds cannot be off alone.
        """
        self._post(names.PATH_PROFILE, msgspec.json.encode(order))

    def inject(self, fault: Inject) -> None:
        """Inject a fault into a rank.

        Raises JobError: the job does not allow it, or it is impossible.
        """
        self._post(names.PATH_INJECT, msgspec.json.encode(fault))

    def _post(self, path: str, body: bytes) -> None:
        with self._call("POST", path, body) as call:
            call.read()

    def _stream(self, path: str, query: dict[str, Any]) -> EventStream:
        return EventStream(self._call("GET", f"{path}?{urlencode(query)}"))

    def _call(self, method: str, target: str, body: bytes | None = None) -> _Call:
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        return _Call(self._transport, method, target, headers, body)


class EventStream(AbstractContextManager["EventStream"]):
    """Yields the events of a job as they arrive, until the job has ended."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[journal.AnyEvent]:
        """Yield each event. Raises JobError: the stream broke off before the job ended."""
        ended = False
        while line := self._read_line(may_end=ended):
            if json.loads(line).get("type") == "keepalive":
                continue
            event = journal.decode(line)
            # The Ended event of an earlier attempt may precede others. Only that of the newest
            # attempt is last.
            ended = isinstance(event, journal.Ended)
            yield event

    def _read_line(self, *, may_end: bool = False) -> bytes:
        try:
            line = self._call.response.readline()
        except (OSError, http.client.HTTPException) as error:
            raise JobError(f"{self._call.where} has ended or hangs: {error!r}") from error
        if not line.endswith(b"\n") and not may_end:
            raise JobError(
                f"{self._call.where} has ended: its stream of events stopped before the end of "
                "the job"
            )
        return line

    def close(self) -> None:
        """Close the connection, and release the lease if this stream holds it."""
        self._call.close()


class _Call(AbstractContextManager["_Call"]):
    """One request and its answer; it turns refusals into errors."""

    def __init__(
        self,
        transport: Transport,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes | None = None,
    ) -> None:
        self.where = transport.where
        self._connection = transport.connect()
        try:
            self._connection.request(method, target, body, headers)
            self.response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise UnansweredError(f"{self.where} does not answer: {error}") from error
        if self.response.status != http.HTTPStatus.OK:
            self._refuse()

    def read(self) -> bytes:
        """Read the complete answer. Raises UnansweredError: it broke off."""
        try:
            return self.response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnansweredError(
                f"{self.where} has ended: its answer is incomplete ({error!r})"
            ) from error

    def decode(self, kind: type[T]) -> T:
        """Decode the complete answer from JSON. Raises JobError: it has another format."""
        try:
            return msgspec.json.decode(self.read(), type=kind)
        except msgspec.DecodeError as error:
            raise JobError(
                f"{self.where} does not have this version of Rekindle: {error}"
            ) from error

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _refuse(self) -> None:
        status = self.response.status
        try:
            body = self.read().decode(errors="replace")
        finally:
            self.close()
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        answer = answer if isinstance(answer, dict) else {}
        text = answer.get("error") or answer.get("message") or " ".join(body.split())[:_SHOWN]
        if status == http.HTTPStatus.CONFLICT:
            raise LeaseHeldError(f"{self.where} refuses: {text}")
        # An API server that passes requests on puts its own apiVersion into its answers.
        on_the_way = status in _ON_THE_WAY or "apiVersion" in answer
        if status == http.HTTPStatus.UNPROCESSABLE_ENTITY and not on_the_way:
            raise UsageError(f"{self.where} refuses: {text}")
        refusal = UnansweredError if on_the_way else JobError
        raise refusal(f"{self.where} refuses with HTTP status {status}: {text}")
